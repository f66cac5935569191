"""Benchmarks: cases x implementations, one JSON object a line; a table and plots from them.

``cases`` says what is computed, ``implementations`` who computes it, ``machines`` where, ``run``
checks and times, ``report`` writes up. ``python -m cupyflash bench`` is the way in (``command``).
"""

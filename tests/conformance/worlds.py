"""The two worlds that a conformance case runs in."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash import nvrtc
from cupyflash.driver import PreparedLaunch, TensorMap, default_driver
from tests.conformance import suite
from tests.conformance.suite import Case
from tests.conformance.values import THREADS


class Device:
    """The current GPU, through NVRTC and libcupyflash."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._index = cupy.cuda.Device().id
        self._driver = default_driver()

    def describe(self) -> dict[str, Any]:
        """The GPU and what compiled for it: what a record carries as its proof of origin."""
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._index)
        raw = bytes(properties["uuid"])[:16].hex()
        parts = (raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:])
        return {
            "name": properties["name"].decode(),
            "uuid": "GPU-" + "-".join(parts),
            "driver": ".".join(map(str, self._driver.version())),
            "nvrtc": nvrtc.version(),
        }

    @functools.cache  # noqa: B019 - one per process
    def _function(self, group: str) -> int:
        unit = suite.translation_unit(group)
        cubin = nvrtc.compile(unit).cubin
        return self._driver.load(self._index, cubin, unit.name, suite.SHARED_BYTES)

    def run(self, case: Case) -> NDArray[np.uint8]:
        source, target = self._cupy.asarray(case.input), self._cupy.asarray(case.output_before)
        pointers = (source.data.ptr, target.data.ptr)
        maps = []
        if case.map is not None:
            maps.append(
                TensorMap(
                    offset=0,
                    pointer_idx=0 if case.map.of == "in" else 1,
                    dtype=case.map.dtype,
                    dims=case.map.dims,
                    strides_bytes=case.map.strides_bytes,
                    box=case.map.box,
                    swizzle=case.map.swizzle,
                    shift_bytes=case.map.shift_bytes,
                )
            )
        prepared = PreparedLaunch(
            context=self._driver.context(self._index),
            function=self._function(case.group),
            grid=(case.cluster, 1, 1),
            block=(THREADS, 1, 1),
            cluster=case.cluster,
            shared_bytes=suite.SHARED_BYTES,
            params=case.params(*pointers),
            pointer_offsets=[suite.IN_OFFSET, suite.OUT_OFFSET],
            maps=maps,
        )
        stream = self._cupy.cuda.get_current_stream()
        self._driver.launch(prepared, stream.ptr, pointers)
        stream.synchronize()
        return target.get()


class Emulator:
    """The CPU emulator."""

    def __init__(self, schedule: str = "early", seed: int = 0) -> None:
        self._schedule = schedule
        self._seed = seed

    def run(self, case: Case) -> NDArray[np.uint8]:
        from cupyflash import emulate

        device = emulate.device(suite.TARGET)
        source, target = device.array(case.input), device.array(case.output_before)
        pointers = (source.pointer, target.pointer)
        emulate.run(
            _emulated_kernel(case.group),
            case.cluster,
            case.params(*pointers),
            case.map_requests(*pointers),
            shared_bytes=suite.SHARED_BYTES,
            schedule=self._schedule,
            seed=self._seed,
        )
        return target.numpy()


@functools.cache
def _emulated_kernel(group: str) -> Any:
    from cupyflash import emulate

    return emulate.build(suite.translation_unit(group))

"""Which kernels a wheel carries, by recipe and target."""

from __future__ import annotations

from cupyflash.select import (
    KernelSpec,
    backward_convert_spec,
    backward_delta_spec,
    backward_queries_spec,
    backward_spec_for,
    fp8_spec_for,
    merge_spec,
    quantize_spec,
    spec_for,
)
from cupyflash.tuning import (
    DTYPES,
    FAMILIES,
    MERGE_DTYPES,
    QUANTIZE_BLOCKS,
    QUANTIZE_DTYPES,
    Family,
    device_bytes,
)

RECIPES: dict[str, tuple[str, ...]] = {
    # Compute capabilities 8.x, 9.0, 10.0 and 10.3, each with the kernels made for it.
    "core": ("sm_80", "sm_90a", "sm_100f"),
    # Also the sm80 family where it is second choice (tensors that TMA cannot address on 9.0 and
    # 10.x, head_dim above 128 on 10.x) and where it is the only one (12.x).
    "full": ("sm_80", "sm_90a", "sm_100f", "sm_90", "sm_100", "sm_103", "sm_120"),
    "none": (),
}
"""Recipe, as CUPYFLASH_AOT names it, to targets; CUPYFLASH_AOT_TARGETS replaces the targets."""

KIB = 1024
SHARED_BYTES = {
    "sm_80": (163 * KIB, 99 * KIB),  # also serves 8.6 and 8.9
    "sm_86": (99 * KIB,),
    "sm_89": (99 * KIB,),
    "sm_90": (227 * KIB,),
    "sm_90a": (227 * KIB,),
    "sm_100": (227 * KIB,),
    "sm_100f": (227 * KIB,),
    "sm_103": (227 * KIB,),
    "sm_120": (99 * KIB,),
}
"""Shared memory of a block, bytes, on the devices that a target serves."""


def specs(recipe: str, targets: tuple[str, ...] = ()) -> tuple[KernelSpec, ...]:
    """The kernels of a recipe; with ``targets``, for those instead of the recipe's own.

    Raises:
        ValueError: an unknown recipe or target.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe {recipe!r}: expected one of {', '.join(RECIPES)}")
    if recipe == "none":
        return ()
    chosen = targets or RECIPES[recipe]
    unknown = [target for target in chosen if target not in SHARED_BYTES]
    if unknown:
        raise ValueError(f"target {unknown[0]!r}: expected one of {', '.join(SHARED_BYTES)}")
    return tuple(dict.fromkeys(spec for target in chosen for spec in _specs_of(target)))


def family_of(target: str) -> Family:
    """The family whose kernels a target gets."""
    special = {"sm_90a": "sm90", "sm_100f": "sm100", "sm_100a": "sm100"}
    return FAMILIES[special.get(target, "sm80")]


def _specs_of(target: str) -> list[KernelSpec]:
    """What the devices of a target would choose: the first row that fits and serves, each, alone
    and in clusters (lengths decide between them); the merges and quantizations."""
    family = family_of(target)
    found = [merge_spec(dtype, target) for dtype in MERGE_DTYPES]
    found += [
        quantize_spec(dtype, target, pieces, bool(rotate))
        for dtype in QUANTIZE_DTYPES
        for pieces, rotate in QUANTIZE_BLOCKS
    ]
    for shared_bytes in SHARED_BYTES[target]:
        served = set()
        for tile in family.tiles:
            if family.device_bytes(tile) > shared_bytes:
                continue
            for dtype in tile.dtypes:
                for mask in tile.masks:
                    widths = (tile.head_dim_qk, tile.head_dim_v)
                    use = (*widths, tile.cluster, tile.max_seqlen, dtype, mask)
                    if use in served:
                        continue
                    served.add(use)
                    found.append(spec_for(family, tile, target, dtype, mask))
                    if family.general and mask != "none":
                        found.append(spec_for(family, tile, target, dtype, mask, general=True))
        found += _fp8_specs(family, target, shared_bytes)
        found += _backward_specs(family, target, shared_bytes)
    return list(dict.fromkeys(found))


def _fp8_specs(family: Family, target: str, shared_bytes: int) -> list[KernelSpec]:
    """The forward kernels of 8-bit floats that fit, for either type of output."""
    if family.fp8 is None:
        return []
    found = []
    for tile in family.fp8.tiles:
        if device_bytes(family.fp8.shared_bytes(tile), tile.min_blocks) > shared_bytes:
            continue
        for out_dtype in DTYPES:
            for mask in tile.masks:
                found.append(fp8_spec_for(family, tile, target, out_dtype, mask))
                if family.general and mask != "none":
                    found.append(fp8_spec_for(family, tile, target, out_dtype, mask, general=True))
    return found


def _backward_specs(family: Family, target: str, shared_bytes: int) -> list[KernelSpec]:
    """The first main kernel of each use that fits, and the kernels before and after it."""
    if family.backward is None:
        return []
    found = [backward_delta_spec(dtype, target) for dtype in DTYPES]
    served = set()
    for tile in family.backward.tiles:
        if device_bytes(family.backward.shared_bytes(tile), tile.min_blocks) > shared_bytes:
            continue
        for dtype in tile.dtypes:
            for mask in tile.masks:
                use = (tile.head_dim_qk, tile.head_dim_v, dtype, mask)
                if use in served:
                    continue
                served.add(use)
                kinds = (False,) if mask == "none" else (False, True)
                for general in kinds:
                    main = backward_spec_for(family, tile, target, dtype, mask, general)
                    if main.kernel == "backward_keys":
                        found += [main, backward_queries_spec(main)]
                    else:
                        found += [main, backward_convert_spec(main, target)]
    return found

LANES: int
RADIX_H: int
RADIX_Z: int

class Shape:
    def __init__(
        self,
        cell: int,
        rule: int,
        blocks: int,
        inputs: int,
        hidden: int,
        stored: int,
        floor: float,
        z_min: int,
        gumbel: bool,
        softness: float,
        zoneout: float,
        dropout: float,
        draws: bool,
        seed: int,
    ) -> None: ...

def gather_offcuts() -> None: ...
def keep_freed_memory() -> None: ...
def use_large_pages(block: int, bytes: int, /) -> None: ...
def compact(region: int, capacity: int, fill: int, rows: int, out: int, /) -> None: ...
def lay_out(sealed: int, rows: int, fill: int, begin: int, /) -> int: ...
def pack_lanes(lanes: int, rows: int, packed: int, /) -> None: ...
def unpack_lanes(packed: int, rows: int, lanes: int, /) -> None: ...
def borrow_openmp(gomp_parallel: int, /) -> None: ...
def tiers() -> list[str]: ...
def packed_floats(tier: str, shape: Shape, backward: bool, /) -> int: ...
def scratch_floats(tier: str, shape: Shape, batch: int, threads: int, /) -> int: ...
def pack(
    tier: str,
    shape: Shape,
    ih: int,
    hh: int,
    bias: int,
    backward: bool,
    packed: int,
    threads: int,
) -> None: ...
def walk(
    tier: str,
    reverse: bool,
    shape: Shape,
    steps: int,
    rows: int,
    batch: int,
    offsets: int,
    active: int,
    first: int,
    stride: int,
    packed: int,
    x: int,
    state: int,
    lanes: int,
    stack: int,
    begin: int,
    fill: int,
    ideal: int,
    writing: bool,
    stored: int,
    out: int,
    out_stride: int,
    out_units: int,
    gates: int,
    old: int,
    mid: int,
    extra: int,
    scratch: int,
    threads: int,
) -> tuple[int, int, int]: ...
def backprop(
    tier: str,
    shape: Shape,
    steps: int,
    rows: int,
    batch: int,
    offsets: int,
    active: int,
    first: int,
    stride: int,
    packed: int,
    x: int,
    gates: int,
    old: int,
    mid: int,
    extra: int,
    d_out: int,
    d_out_stride: int,
    d_out_units: int,
    d_state: int,
    d_x: int,
    d_ih: int,
    d_hh: int,
    d_bias: int,
    scratch: int,
    threads: int,
) -> None: ...

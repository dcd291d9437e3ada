"""y = dropout(activation(x + bias)), forward and backward, and the bare mask.

A tile is (row groups, columns). A row group is the eight rows of one Philox call, so a kernel walks its rows K = 0..7
as eight subtiles of one load each, all issued before the random words are computed, and the K-th draw is already in the
thread that needs it. Row groups are counted in the global index: with `skip = row0 % 8` and group 0 at `row0 // 8`,
row in the tensor = 8 * group + K - skip.
"""

from .._triton import jit, tl
from ..philox import draw_words, drop, row_draw

# Values that change from call to call must not change the compiled kernel: Triton specialises 1 and multiples of 16
_VARYING = ["key", "offset", "last_dropped", "group0", "col0", "skip", "m", "n", "blocks_n", "tiles", "splits"]
_VARYING += ["stride_x", "stride_dy"]


@jit
def widen(x, PTX: tl.constexpr):
    """x as fp32; a pair of bfloat16 in two instructions, where the compiler takes three."""
    if PTX and x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }", "=f,=f,r", [x], tl.float32, True, 2
        )
    else:
        y = x.to(tl.float32)
    return y


@jit
def multiple_of(value, ALIGN: tl.constexpr):
    """`value`, of which the compiler then knows that ALIGN divides it: a hint on an argument has no effect."""
    return value // ALIGN * ALIGN


@jit
def tile_rows(tile_group, m, skip, BLOCK_G: tl.constexpr):
    """Of the tile that starts at a row group: its first row in the tensor, and its range [first, end) of real rows."""
    tile_row = tile_group * 8 - skip
    first = tl.maximum(-tile_row, 0).to(tl.int32)
    end = tl.minimum(m - tile_row, 8 * BLOCK_G).to(tl.int32)
    return tile_row, first, end


@jit
def load_seed(seed_ptr, key, offset):
    """(key, offset) from device memory if there is a pointer, else the arguments."""
    if seed_ptr is not None:
        key = tl.load(seed_ptr)
        offset = tl.load(seed_ptr + 1)
    return key.to(tl.int64), offset.to(tl.int64)


@jit
def tile_words(tile_group, tile_col, groups, cols, key, offset, group0, col0, PTX: tl.constexpr):
    """The random words of a tile."""
    group = (tile_group.to(tl.uint32) + group0.to(tl.uint32)) + groups.to(tl.uint32)
    col = (tile_col.to(tl.uint32) + col0.to(tl.uint32)) + cols.to(tl.uint32)
    return draw_words(group, col, key, offset, PTX)


@jit
def row_exists(rows, k, first, end, WHOLE: tl.constexpr):
    """Which groups have a k-th row, (BLOCK_G, 1); where all groups are whole, one answer serves all eight."""
    # one comparison: as unsigned numbers, rows before the first are beyond any end
    return rows < end if WHOLE else (rows + (k - first)).to(tl.uint32) < tl.maximum(end - first, 0).to(tl.uint32)


@jit
def load_rows(tile_ptr, stride, rows, first, end, in_n, WHOLE: tl.constexpr):
    """The tile's eight subtiles; elements outside the tensor read as 0."""
    loaded = ()
    for k in tl.static_range(8):
        loaded = loaded + (tl.load(tile_ptr + k * stride, row_exists(rows, k, first, end, WHOLE) & in_n, 0.0),)
    return loaded


@jit
def load_bias(bias_ptr, cols, in_n, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, PTX: tl.constexpr):
    """The tile's bias as fp32, loaded in the layout of x: a vector's layout would be shuffled through shared memory."""
    return widen(tl.load(tl.broadcast_to(bias_ptr + cols, (BLOCK_G, BLOCK_N)), in_n, 0.0), PTX)


@jit(do_not_specialize=_VARYING)
def forward_kernel(
    x_ptr,
    bias_ptr,
    y_ptr,
    seed_ptr,
    key: tl.int64,
    offset: tl.int64,
    last_dropped: tl.uint32,
    scale: tl.float32,
    a: tl.float32,
    b: tl.float32,
    group0: tl.uint32,
    col0: tl.uint32,
    skip: tl.int32,
    m: tl.int64,
    n: tl.int64,
    blocks_n: tl.int32,
    tiles: tl.int32,
    splits: tl.int32,
    stride_x: tl.int64,
    ACT: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
    PTX: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y = keep * scale * ACT(x + bias); of each column block's `tiles`, a program takes every `splits`-th.

    So the programs that run together read neighbouring rows.
    """
    n, stride_x = multiple_of(n, ALIGN), multiple_of(stride_x, ALIGN)
    pid = tl.program_id(0)
    tile_col = (pid % blocks_n).to(tl.int64) * BLOCK_N
    split = pid // blocks_n
    groups = tl.arange(0, BLOCK_G)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    rows = groups * 8
    in_n = cols < tl.minimum(n - tile_col, BLOCK_N).to(tl.int32)
    if bias_ptr is not None:
        bias = load_bias(bias_ptr + tile_col, cols, in_n, BLOCK_G, BLOCK_N, PTX)
    if DROPOUT:
        key, offset = load_seed(seed_ptr, key, offset)

    for tile in tl.range(split, tiles, splits, num_stages=STAGES):
        tile_group = tl.cast(tile, tl.int64) * BLOCK_G
        tile_row, first, end = tile_rows(tile_group, m, skip, BLOCK_G)
        x_tile = x_ptr + (tile_row * stride_x + tile_col) + rows.to(tl.int64) * stride_x + cols
        xs = load_rows(x_tile, stride_x, rows, first, end, in_n, WHOLE)
        if DROPOUT:
            words = tile_words(tile_group, tile_col, groups, cols, key, offset, group0, col0, PTX)
        y_tile = y_ptr + (tile_row * n + tile_col) + rows.to(tl.int64) * n + cols
        for k in tl.static_range(8):
            u = widen(xs[k], PTX)
            if bias_ptr is not None:
                u += bias
            if DROPOUT:
                y = drop(ACT(scale, u, a, b, FAST, PTX), words, k, last_dropped.to(tl.uint32), PTX)
            else:
                y = ACT(1.0, u, a, b, FAST, PTX)
            tl.store(y_tile + k * n, y.to(y_ptr.dtype.element_ty), row_exists(rows, k, first, end, WHOLE) & in_n)


@jit(do_not_specialize=_VARYING)
def backward_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    dbias_ptr,
    partial_ptr,
    arrived_ptr,
    seed_ptr,
    key: tl.int64,
    offset: tl.int64,
    last_dropped: tl.uint32,
    scale: tl.float32,
    a: tl.float32,
    b: tl.float32,
    group0: tl.uint32,
    col0: tl.uint32,
    skip: tl.int32,
    m: tl.int64,
    n: tl.int64,
    blocks_n: tl.int32,
    tiles: tl.int32,
    splits: tl.int32,
    stride_dy: tl.int64,
    stride_x: tl.int64,
    ACT: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
    PTX: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = ACT'(x + bias) * keep * scale * dy and dbias = sum of dx over rows; ACT is g * derivative.

    Of each column block's `tiles`, a program takes every `splits`-th and writes its fp32 column sums to `partial`
    (splits, n). The last program of a column block to arrive adds the partials, always in the same order, and resets
    the counter.
    """
    n, stride_dy, stride_x = multiple_of(n, ALIGN), multiple_of(stride_dy, ALIGN), multiple_of(stride_x, ALIGN)
    pid = tl.program_id(0)
    block = pid % blocks_n
    split = pid // blocks_n
    tile_col = block.to(tl.int64) * BLOCK_N
    groups = tl.arange(0, BLOCK_G)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    rows = groups * 8
    in_n = cols < tl.minimum(n - tile_col, BLOCK_N).to(tl.int32)
    if bias_ptr is not None:
        bias = load_bias(bias_ptr + tile_col, cols, in_n, BLOCK_G, BLOCK_N, PTX)
    if DROPOUT:
        key, offset = load_seed(seed_ptr, key, offset)
    column_sum = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)

    for tile in tl.range(split, tiles, splits, num_stages=STAGES):
        tile_group = tl.cast(tile, tl.int64) * BLOCK_G
        tile_row, first, end = tile_rows(tile_group, m, skip, BLOCK_G)
        dy_tile = dy_ptr + (tile_row * stride_dy + tile_col) + rows.to(tl.int64) * stride_dy + cols
        dys = load_rows(dy_tile, stride_dy, rows, first, end, in_n, WHOLE)
        if x_ptr is not None:
            x_tile = x_ptr + (tile_row * stride_x + tile_col) + rows.to(tl.int64) * stride_x + cols
            xs = load_rows(x_tile, stride_x, rows, first, end, in_n, WHOLE)
        if DROPOUT:
            words = tile_words(tile_group, tile_col, groups, cols, key, offset, group0, col0, PTX)
        dx_tile = dx_ptr + (tile_row * n + tile_col) + rows.to(tl.int64) * n + cols
        for k in tl.static_range(8):
            exists = row_exists(rows, k, first, end, WHOLE)
            dx = widen(dys[k], PTX)
            if DROPOUT:
                dx *= scale
            if x_ptr is not None:
                u = widen(xs[k], PTX)
                if bias_ptr is not None:
                    u += bias
                dx = ACT(dx, u, a, b, FAST, PTX)
            # a row that does not exist has dy = 0 but, where the derivative at its bias is not finite, not dx = 0
            if DROPOUT:
                dx = drop(dx, words, k, tl.where(exists, last_dropped.to(tl.uint32), 0xFFFFFFFF), PTX)
            elif x_ptr is not None and bias_ptr is not None:
                dx = tl.where(exists, dx, 0.0)
            if dbias_ptr is not None:
                column_sum += dx
            tl.store(dx_tile + k * n, dx.to(dx_ptr.dtype.element_ty), exists & in_n)

    if dbias_ptr is not None:
        col = tile_col + tl.arange(0, BLOCK_N)
        tl.store(partial_ptr + split.to(tl.int64) * n + col, tl.sum(column_sum, 0), col < n)
        tl.debug_barrier()  # every thread's stores come before the one thread's release
        if tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel") == splits - 1:
            at_once: tl.constexpr = 2048 // BLOCK_N
            total = tl.zeros((at_once, BLOCK_N), tl.float32)
            for start in tl.range(0, splits, at_once, loop_unroll_factor=2):
                parts = start + tl.arange(0, at_once)[:, None]
                part = parts.to(tl.int64) * n + tile_col + cols
                total += tl.load(partial_ptr + part, (parts < splits) & in_n, 0.0, cache_modifier=".cg")
            tl.store(dbias_ptr + col, tl.sum(total, 0).to(dbias_ptr.dtype.element_ty), col < n)
            tl.store(arrived_ptr + block, 0)


@jit(do_not_specialize=_VARYING)
def mask_kernel(
    keep_ptr,
    seed_ptr,
    key: tl.int64,
    offset: tl.int64,
    last_dropped: tl.uint32,
    group0: tl.uint32,
    col0: tl.uint32,
    skip: tl.int32,
    m: tl.int64,
    n: tl.int64,
    blocks_n: tl.int32,
    PTX: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """keep (m, n), one byte an element, for a tile of 8 * BLOCK_G rows and BLOCK_N columns."""
    n = multiple_of(n, ALIGN)
    pid = tl.program_id(0)
    tile_col = (pid % blocks_n).to(tl.int64) * BLOCK_N
    tile_group = (pid // blocks_n).to(tl.int64) * BLOCK_G
    tile_row, first, end = tile_rows(tile_group, m, skip, BLOCK_G)
    groups = tl.arange(0, BLOCK_G)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    rows = groups * 8
    key, offset = load_seed(seed_ptr, key, offset)
    words = tile_words(tile_group, tile_col, groups, cols, key, offset, group0, col0, PTX)
    keep_tile = keep_ptr + (tile_row * n + tile_col) + rows.to(tl.int64) * n + cols
    for k in tl.static_range(8):
        keep = row_draw(words, k) > last_dropped.to(tl.uint32)
        inside = row_exists(rows, k, first, end, False) & (tile_col + cols < n)
        tl.store(keep_tile + k * n, keep.to(keep_ptr.dtype.element_ty), inside)

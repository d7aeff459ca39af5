"""Paged latent attention of requests with one query each, for Hopper, in Gluon.

A program takes one split of one request for 64 heads, as in core's latent_decode.py, in blocks of 64 positions. Its
warps have three parts, which meet at barriers in shared memory:

* ``_load_blocks``, one warp, has the tensor memory accelerator copy blocks into a ring of two;
* ``_scores_and_left``, four warps, multiplies queries and keys, computes weights, and sums the left half of latents;
* ``_right``, four warps, sums the right half with the weights that the other part left in shared memory.

Both halves of the sums are 64 x 256 float32: 128 registers of a thread. Queries, two blocks and weights take 224 KiB of
shared memory. Products are asynchronous: the scores of the next block are queued behind the left half's sum, and the
right half's sum is computed meanwhile. "Warp-group MMA" and "Warp specialization" of Triton's Gluon tutorials describe
the operations; triton 3.6 and 3.7 have them alike.

Axes: N requests, H query heads, L = 512 latent size, R = 64 rope size, B page size.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hardpoint_cuda.kernels.latent_hopper_splits import exp2, find_split, merge_columns

HEADS = gl.constexpr(64)
"""Of a program: rows of a warp group's product."""
POSITIONS = gl.constexpr(64)
"""Of a block."""
LATENT_SIZE = gl.constexpr(512)
ROPE_SIZE = gl.constexpr(64)
_HALF = gl.constexpr(256)
_BOX = gl.constexpr(64)
"""Elements of a row that one copy takes: 128 bytes, over which shared memory is swizzled."""
BOX_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=3)
"""Of a box [1, positions, _BOX] of a cache's pages."""

_synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # by its names in Triton 3.7 and 3.6
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def _load(pages, page, row, column, ready, tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BOX_ROW: gl.constexpr):
    """Copy ``ROWS`` positions of a page, from ``column`` on, to their place in ``tile`` [POSITIONS, COLUMNS]."""
    PER_COLUMN: gl.constexpr = POSITIONS // ROWS
    boxes = tile._reinterpret(tile.dtype, [COLUMNS // _BOX * PER_COLUMN, 1, ROWS, _BOX], pages.layout)
    for i in gl.static_range(COLUMNS // _BOX):
        place = boxes.index(i * PER_COLUMN + BOX_ROW)
        tma.async_copy_global_to_shared(pages, [page, row, column + i * _BOX], ready, place)


@gluon.jit
def _load_blocks(
    latents,
    rope_keys,
    block_row,
    begin,
    end,
    blocks,
    left,
    right,
    rope,
    left_ready,
    right_ready,
    left_free,
    right_free,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Fill the ring, the left half and rotated keys of a block first. Pages behind ``end`` are never read."""
    BOXES: gl.constexpr = POSITIONS // ROWS
    for block in range(blocks):
        stage = block % 2
        phase = (block // 2) & 1
        first = begin + block * POSITIONS
        ready = left_ready.index(stage)
        mbarrier.wait(left_free.index(stage), phase ^ 1)
        mbarrier.expect(ready, POSITIONS * (_HALF + ROPE_SIZE) * 2)
        for i in gl.static_range(BOXES):
            position = first + i * ROWS
            page = gl.load(block_row + gl.minimum(position, end - 1) // BLOCK_SIZE)
            offset = position % BLOCK_SIZE
            _load(latents, page, offset, 0, ready, left.index(stage), ROWS, _HALF, i)
            _load(rope_keys, page, offset, 0, ready, rope.index(stage), ROWS, ROPE_SIZE, i)
        ready = right_ready.index(stage)
        mbarrier.wait(right_free.index(stage), phase ^ 1)
        mbarrier.expect(ready, POSITIONS * _HALF * 2)
        for i in gl.static_range(BOXES):
            position = first + i * ROWS
            page = gl.load(block_row + gl.minimum(position, end - 1) // BLOCK_SIZE)
            _load(latents, page, position % BLOCK_SIZE, _HALF, ready, right.index(stage), ROWS, _HALF, i)


@gluon.jit
def _clear(tile, limit):
    """Zeros in a half's rows from ``limit`` on, which may be no numbers: their weights of zero would not hide that."""
    PART: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inside = gl.arange(0, POSITIONS, gl.SliceLayout(1, PART)) < limit
    for i in gl.static_range(_HALF // _BOX):
        part = tile.slice(i * _BOX, _BOX, dim=1)
        values = part.load(PART)
        part.store(gl.where(inside[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    _synchronize()


@gluon.jit
def _scores(q_left, q_right, q_rope, left, right, rope, left_ready, right_ready, block):
    """Begin the products of queries and a block's keys, which are float32 [HEADS, POSITIONS]: three of them."""
    stage = block % 2
    phase = (block // 2) & 1
    nothing = gl.zeros([HEADS, POSITIONS], gl.float32, _SCORES)
    mbarrier.wait(left_ready.index(stage), phase)
    scores = warpgroup_mma(q_left, left.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_rope, rope.index(stage).permute((1, 0)), scores, is_async=True)
    mbarrier.wait(right_ready.index(stage), phase)
    return warpgroup_mma(q_right, right.index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _weigh(scores, highest, score_factor):
    """Weights of a block, the new highest score, and the factor by which earlier weights are too large."""
    new_highest = gl.maximum(highest, gl.max(scores, 1) * score_factor)
    weights = exp2(scores * score_factor - new_highest[:, None])
    return weights, new_highest, exp2(highest - new_highest)


@gluon.jit
def _store_half(result, tile, out, out_head_stride, head, first_column):
    """Store sums by way of ``tile``, which nothing reads any more, so that a warp writes whole rows."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    tile.store(result.to(tile.dtype))
    _synchronize()
    heads = head + gl.arange(0, HEADS, gl.SliceLayout(1, ROWS))
    columns = first_column + gl.arange(0, _HALF, gl.SliceLayout(0, ROWS))
    gl.store(out + heads[:, None].to(gl.int64) * out_head_stride + columns[None, :], tile.load(ROWS))


@gluon.jit
def _finish(
    accumulated,
    total,
    highest,
    tile,
    out,
    out_head_stride,
    partial,
    counter,
    place,
    first_place,
    splits,
    head,
    HALF: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    SPLITS: gl.constexpr,
    MOST_SPLITS: gl.constexpr,
):
    """Store one half of a request's sums, or of a split's: then the last of them merges this half of all."""
    column: gl.constexpr = HALF * _HALF
    if splits == 0:
        _store_half(accumulated * (1.0 / total)[:, None], tile, out, out_head_stride, head, column)
    else:
        rows = place * NUM_HEADS + head + gl.arange(0, HEADS, gl.SliceLayout(1, _SUM))
        columns = column + gl.arange(0, _HALF, gl.SliceLayout(0, _SUM))
        sums = partial + SPLITS * NUM_HEADS * (LATENT_SIZE + 2 * HALF)
        gl.store(partial + rows[:, None] * LATENT_SIZE + columns[None, :], accumulated)
        gl.store(sums + rows * 2, highest)
        gl.store(sums + rows * 2 + 1, total)
        _synchronize()  # all threads' stores come before the one thread's atomic operation, which publishes them
        if gl.atomic_add(counter + HALF, 1, sem="acq_rel", scope="gpu") == splits - 1:
            gl.store(counter + HALF, 0)
            merge_columns(
                out,
                out_head_stride,
                partial,
                sums,
                first_place,
                splits,
                head,
                column,
                HEADS,
                _HALF,
                NUM_HEADS,
                LATENT_SIZE,
                MOST_SPLITS,
            )


@gluon.jit
def _scores_and_left(
    q_left,
    q_right,
    q_rope,
    left,
    right,
    rope,
    left_ready,
    right_ready,
    left_free,
    weights_tile,
    decay_row,
    totals,
    weights_ready,
    weights_free,
    score_factor,
    last_count,
    blocks,
    out,
    out_head_stride,
    partial,
    counter,
    place,
    first_place,
    splits,
    head,
    NUM_HEADS: gl.constexpr,
    SPLITS: gl.constexpr,
    MOST_SPLITS: gl.constexpr,
):
    """See the top of this file. ``last_count``: positions of the last block; only there is anything masked."""
    ROW: gl.constexpr = gl.SliceLayout(1, _SUM)
    accumulated = gl.zeros([HEADS, _HALF], gl.float32, _SUM)
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
    highest = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
    last = blocks - 1
    product = _scores(q_left, q_right, q_rope, left, right, rope, left_ready, right_ready, 0)
    for block in range(last):
        scores = warpgroup_mma_wait(0, deps=[product])
        weights, highest, decay = _weigh(scores, highest, score_factor)
        accumulated = accumulated * gl.convert_layout(decay, ROW)[:, None]
        mbarrier.wait(weights_free, (block & 1) ^ 1)
        weights_tile.store(weights.to(weights_tile.dtype))
        decay_row.store(decay)
        fence_async_shared()
        _synchronize()
        mbarrier.arrive(weights_ready)
        left_sum = warpgroup_mma(weights_tile, left.index(block % 2), accumulated, is_async=True)
        product = _scores(q_left, q_right, q_rope, left, right, rope, left_ready, right_ready, block + 1)
        total = total * decay + gl.sum(weights, 1)
        accumulated = warpgroup_mma_wait(3, deps=[left_sum])  # not for the three of the next scores
        _synchronize()
        mbarrier.arrive(left_free.index(block % 2))

    scores = warpgroup_mma_wait(0, deps=[product])
    inside = gl.arange(0, POSITIONS, gl.SliceLayout(0, _SCORES)) < last_count
    scores = gl.where(inside[None, :], scores, float("-inf"))
    weights, highest, decay = _weigh(scores, highest, score_factor)
    accumulated = accumulated * gl.convert_layout(decay, ROW)[:, None]
    total = total * decay + gl.sum(weights, 1)
    mbarrier.wait(weights_free, (last & 1) ^ 1)
    weights_tile.store(weights.to(weights_tile.dtype))
    decay_row.store(decay)
    totals.index(0).store(total)
    totals.index(1).store(highest)
    fence_async_shared()
    _synchronize()
    mbarrier.arrive(weights_ready)
    tile = left.index(last % 2)
    if last_count < POSITIONS:
        _clear(tile, last_count)
    left_sum = warpgroup_mma(weights_tile, tile, accumulated, is_async=True)
    accumulated = warpgroup_mma_wait(0, deps=[left_sum])
    _finish(
        accumulated,
        gl.convert_layout(total, ROW),
        gl.convert_layout(highest, ROW),
        tile,
        out,
        out_head_stride,
        partial,
        counter,
        place,
        first_place,
        splits,
        head,
        0,
        NUM_HEADS,
        SPLITS,
        MOST_SPLITS,
    )


@gluon.jit
def _add_right(accumulated, tile, weights_tile, decay_row):
    """Scale the sums and add a block's. All warps have read weights and latents when this returns."""
    accumulated = accumulated * decay_row.load(gl.SliceLayout(1, _SUM))[:, None]
    product = warpgroup_mma(weights_tile, tile, accumulated, is_async=True)
    accumulated = warpgroup_mma_wait(0, deps=[product])
    _synchronize()
    return accumulated


@gluon.jit
def _right(
    right,
    right_ready,
    right_free,
    weights_tile,
    decay_row,
    totals,
    weights_ready,
    weights_free,
    last_count,
    blocks,
    out,
    out_head_stride,
    partial,
    counter,
    place,
    first_place,
    splits,
    head,
    NUM_HEADS: gl.constexpr,
    SPLITS: gl.constexpr,
    MOST_SPLITS: gl.constexpr,
):
    """See the top of this file."""
    ROW: gl.constexpr = gl.SliceLayout(1, _SUM)
    accumulated = gl.zeros([HEADS, _HALF], gl.float32, _SUM)
    last = blocks - 1
    for block in range(last):
        mbarrier.wait(right_ready.index(block % 2), (block // 2) & 1)
        mbarrier.wait(weights_ready, block & 1)
        accumulated = _add_right(accumulated, right.index(block % 2), weights_tile, decay_row)
        mbarrier.arrive(weights_free)
        mbarrier.arrive(right_free.index(block % 2))
    tile = right.index(last % 2)
    mbarrier.wait(right_ready.index(last % 2), (last // 2) & 1)
    mbarrier.wait(weights_ready, last & 1)
    if last_count < POSITIONS:
        _clear(tile, last_count)
    accumulated = _add_right(accumulated, tile, weights_tile, decay_row)
    _finish(
        accumulated,
        totals.index(0).load(ROW),
        totals.index(1).load(ROW),
        tile,
        out,
        out_head_stride,
        partial,
        counter,
        place,
        first_place,
        splits,
        head,
        1,
        NUM_HEADS,
        SPLITS,
        MOST_SPLITS,
    )


@gluon.jit
def _load_queries(source, head_stride, tile, COLUMNS: gl.constexpr):
    """Begin the copy of HEADS rows."""
    PER_ROW: gl.constexpr = 32 if COLUMNS > 128 else COLUMNS // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // PER_ROW, PER_ROW], [4, 1], [1, 0])
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE))
    async_copy.async_copy_global_to_shared(tile, source + heads[:, None].to(gl.int64) * head_stride + columns[None, :])


@gluon.jit
def _barriers(NUMBER: gl.constexpr):
    """Barriers at which one arrival ends a phase."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit(
    do_not_specialize=["num_requests", "block_table_stride"],
    do_not_specialize_on_alignment=["block_table", "seq_lens"],  # which may be parts of a batch's
)
def decode_latents_on_hopper(
    q_latent,
    q_latent_token_stride,
    q_latent_head_stride,
    q_rope,
    q_rope_token_stride,
    q_rope_head_stride,
    out,
    out_token_stride,
    out_head_stride,
    latents,
    rope_keys,
    block_table,
    block_table_stride,
    seq_lens,
    num_requests,
    partial,
    counters,
    score_factor,
    NUM_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    SPLITS: gl.constexpr,
    MOST_SPLITS: gl.constexpr,
    MIN_CHUNK: gl.constexpr,
    SCAN: gl.constexpr,
    BEGIN: gl.constexpr,
):
    """Grid: (N + ``SPLITS``) x blocks of HEADS; NUM_HEADS is a multiple of them.

    ``latents`` and ``rope_keys`` are tensor descriptors of pages [pages, B, L] and [pages, B, R] with boxes
    [1, ROWS, 64] of ``BOX_LAYOUT``. ROWS divides both POSITIONS and BLOCK_SIZE, which is B. Queries' rows begin at
    multiples of 16 bytes.
    ``partial`` float32 [SPLITS, H, L] and then [2, SPLITS, H, 2]: each split's sum of latents, and for each half its
    highest score and sum of weights. ``counters`` int32 [SPLITS, blocks of heads, 2], zero before and after.

    Lengths, which the step began with, are read while the kernel before this one may still run.
    """
    BLOCKS: gl.constexpr = NUM_HEADS // HEADS
    head_block = gl.program_id(0) % BLOCKS
    request, begin, end, splits, place, first_place = find_split(
        gl.program_id(0) // BLOCKS, seq_lens, num_requests, SPLITS, MOST_SPLITS, MIN_CHUNK, SCAN, POSITIONS
    )
    if begin >= end:
        return

    if BEGIN is not None:
        BEGIN()
    ELEMENT: gl.constexpr = q_latent.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(ELEMENT, [HEADS, _HALF], TILE)
    q_right = gl.allocate_shared_memory(ELEMENT, [HEADS, _HALF], TILE)
    q_rotated = gl.allocate_shared_memory(ELEMENT, [HEADS, ROPE_SIZE], TILE)
    left = gl.allocate_shared_memory(ELEMENT, [2, POSITIONS, _HALF], TILE)
    right = gl.allocate_shared_memory(ELEMENT, [2, POSITIONS, _HALF], TILE)
    rope = gl.allocate_shared_memory(ELEMENT, [2, POSITIONS, ROPE_SIZE], TILE)
    weights_tile = gl.allocate_shared_memory(ELEMENT, [HEADS, POSITIONS], TILE)
    decay_row = gl.allocate_shared_memory(gl.float32, [HEADS], ROW)
    totals = gl.allocate_shared_memory(gl.float32, [2, HEADS], ROW)
    left_ready = _barriers(2)
    right_ready = _barriers(2)
    left_free = _barriers(2)
    right_free = _barriers(2)
    weights_ready = _barriers(1).index(0)
    weights_free = _barriers(1).index(0)

    head = head_block * HEADS
    request = request.to(gl.int64)
    latent_queries = q_latent + request * q_latent_token_stride + head.to(gl.int64) * q_latent_head_stride
    rope_queries = q_rope + request * q_rope_token_stride + head.to(gl.int64) * q_rope_head_stride
    _load_queries(latent_queries, q_latent_head_stride, q_left, _HALF)
    _load_queries(latent_queries + _HALF, q_latent_head_stride, q_right, _HALF)
    _load_queries(rope_queries, q_rope_head_stride, q_rotated, ROPE_SIZE)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    _synchronize()

    blocks = gl.cdiv(end - begin, POSITIONS)
    last_count = end - begin - (blocks - 1) * POSITIONS
    block_row = block_table + request * block_table_stride
    out += request * out_token_stride
    counter = counters + (first_place * BLOCKS + head_block) * 2
    # Tuples stay in the call: assigned, their constexprs would become numbers of the kernel.
    gl.warp_specialize(
        [
            (
                _scores_and_left,
                (
                    q_left,
                    q_right,
                    q_rotated,
                    left,
                    right,
                    rope,
                    left_ready,
                    right_ready,
                    left_free,
                    weights_tile,
                    decay_row,
                    totals,
                    weights_ready,
                    weights_free,
                    score_factor,
                    last_count,
                    blocks,
                    out,
                    out_head_stride,
                    partial,
                    counter,
                    place,
                    first_place,
                    splits,
                    head,
                    NUM_HEADS,
                    SPLITS,
                    MOST_SPLITS,
                ),
            ),
            (
                _right,
                (
                    right,
                    right_ready,
                    right_free,
                    weights_tile,
                    decay_row,
                    totals,
                    weights_ready,
                    weights_free,
                    last_count,
                    blocks,
                    out,
                    out_head_stride,
                    partial,
                    counter,
                    place,
                    first_place,
                    splits,
                    head,
                    NUM_HEADS,
                    SPLITS,
                    MOST_SPLITS,
                ),
            ),
            (
                _load_blocks,
                (
                    latents,
                    rope_keys,
                    block_row,
                    begin,
                    end,
                    blocks,
                    left,
                    right,
                    rope,
                    left_ready,
                    right_ready,
                    left_free,
                    right_free,
                    BLOCK_SIZE,
                    ROWS,
                ),
            ),
        ],
        [4, 1],  # warps of the second and the third part
        [216, 40],  # registers of their threads; the first part has the rest, 248
    )

"""Choosing K of E experts a row: keys, their order, and the selection itself, as Triton functions that other kernels call.

T rows, E experts, K chosen, G groups. A program has BLOCK_T rows and walks each in CHUNKS chunks of LANES columns; KEYS is the next
power of two of K, and a [BLOCK_T, KEYS] tensor holds what was chosen, one slot each.

A key becomes an int32 that orders as keys do (`ordered`). For the selection its low bits are replaced by the column, counted from
the end, so that keys are distinct, an equal key with a lower column wins, and a maximum names its column: one integer maximum per
choice, which a warp makes in one instruction. Keys that differ only in the bits that were replaced come out in the wrong order;
that is seen afterwards (the chosen keys are looked at in full), and such rows, about one in a hundred, are chosen again, exactly.

Each lane first sorts the best DEPTH of its own columns (one of each chunk). A choice then is the maximum over the lanes' bests, and
the lane that held it moves up: 1 + DEPTH operations a lane instead of going through all columns again. A row in which a lane gave
all of its DEPTH is chosen again, too; the launcher takes DEPTH so that this is rare.
"""

# Tuples grow, and branches on constants vanish, while a kernel is traced, which Python's types cannot express.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-(2**31))  # below every key: columns that do not exist, or were taken
NAN_KEY: tl.constexpr = tl.constexpr(-(2**31) + 2**22)  # below -inf, which is -(2**31) + 2**23 - 1
LOG2_E: tl.constexpr = tl.constexpr(1.4426950216293335)  # log2(e) rounded to fp32, and what that lost
LOG2_E_LOW: tl.constexpr = tl.constexpr(1.925963033500623e-08)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
UNROLLED: tl.constexpr = tl.constexpr(16)  # choices up to which the loop over them is written out


# --- activations ------------------------------------------------------------------------------------------------------------------


@triton.jit
def exp(x):
    """e^x of finite |x| <= 87 to about an ulp: what rounding x * log2(e) loses is put back."""
    power = x * LOG2_E
    lost = tl.fma(x, LOG2_E, -power) + x * LOG2_E_LOW
    value = tl.exp2(power)
    return tl.fma(value, lost * LN_2, value)


@triton.jit
def divide(a, b):
    """a / b with one Newton step: about an ulp, where the fast division has two."""
    reciprocal = 1.0 / b
    reciprocal = tl.fma(reciprocal, tl.fma(-b, reciprocal, 1.0), reciprocal)
    return a * reciprocal


@triton.jit
def sigmoid(x):
    # Comparisons, not minimum and maximum: NaN stays NaN.
    clamped = tl.where(x > 87.0, 87.0, tl.where(x < -87.0, -87.0, x))
    return divide(1.0, 1.0 + exp(-clamped))


@triton.jit
def fast_sigmoid(x):
    """Sigmoid to 4e-7, in five instructions: the hardware's reciprocal root squared is far cheaper than a division."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log1p(u), u = e^-|x|; log1p(u) = 2 atanh(s), s = u / (2 + u) <= 1/3, as a power series."""
    size = tl.abs(x)
    u = tl.where(size > 87.0, 0.0, exp(-tl.where(size > 87.0, 87.0, size)))
    s = divide(u, 2.0 + u)
    q = s * s
    series = tl.fma(q, 1.0 / 15.0, 1.0 / 13.0)
    series = tl.fma(q, series, 1.0 / 11.0)
    series = tl.fma(q, series, 1.0 / 9.0)
    series = tl.fma(q, series, 1.0 / 7.0)
    series = tl.fma(q, series, 1.0 / 5.0)
    series = tl.fma(q, series, 1.0 / 3.0)
    log1p = 2.0 * tl.fma(s * q, series, s)
    return tl.where(x > 20.0, x, tl.where(x > 0.0, x, 0.0) + log1p)


@triton.jit
def activation(x, SCORE: tl.constexpr):
    """The score of one expert by itself; softmax's key is the logit.

    Below -87, where e^x is no normal number, sigmoid stays what it is there and sqrtsoftplus is 0: such logits tie.
    """
    if SCORE == "sigmoid":
        return sigmoid(x)
    elif SCORE == "sqrtsoftplus":
        return tl.sqrt_rn(softplus(x))
    else:
        return x


@triton.jit
def activation_slope(x, a, SCORE: tl.constexpr):
    """d activation / dx, from x and a = activation(x)."""
    if SCORE == "sigmoid":
        return a * (1.0 - a)
    else:
        # A score that vanished has no slope: 0, not the quotient of two tiny numbers.
        return tl.where(a == 0.0, 0.0, tl.where(x > 20.0, 1.0, sigmoid(x)) / (2.0 * a + 1e-20))


# --- columns and keys -------------------------------------------------------------------------------------------------------------


@triton.jit
def columns(FIRST: tl.constexpr, LANES: tl.constexpr, E: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """(expert, exists) of the LANES columns from FIRST on. A group has WIDTH columns, a power of two, and maybe fewer experts."""
    at = FIRST + tl.arange(0, LANES)
    if GROUPS > 0:
        within = at % WIDTH
        return at // WIDTH * (E // GROUPS) + within, (within < E // GROUPS) & (at < GROUPS * WIDTH)
    else:
        return at, at < E


@triton.jit
def load_columns(row_at, live, expert, exists, column_stride, EVEN: tl.constexpr):
    """fp32 [BLOCK_T, LANES] of rows at `row_at`; 0 where a row is not live or a column does not exist."""
    at = row_at[:, None] + expert[None, :] * column_stride
    if EVEN:
        return tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
    else:
        return tl.load(at, mask=live[:, None] & exists[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_rows(
    row_at, live, column_stride, E: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The logits of rows, a tuple of CHUNKS fp32 [BLOCK_T, LANES]; 0 in rows that are not live, anything where no column is."""
    xs = ()
    for chunk in tl.static_range(CHUNKS):
        expert, exists = columns(chunk * LANES, LANES, E, GROUPS, WIDTH)
        xs = xs + (load_columns(row_at, live, expert, exists, column_stride, EVEN),)
    return xs


@triton.jit
def softmax_terms(xs, E: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr):
    """(terms, rate, shift, total) of rows: terms are CHUNKS [BLOCK_T, LANES] of 2^(x * rate - shift), total [BLOCK_T] is their sum.

    rate is log2(e). shift is the greatest logit times rate, rounded once for the whole row, so that its error cancels: softmax is
    term / total. Where that error would be no exponent, rate is 1: such logits are equal or 64 apart, and then vanish at any rate.
    """
    if not EVEN:
        real = ()
        for chunk in tl.static_range(CHUNKS):
            expert, exists = columns(chunk * LANES, LANES, E, 0, 1)
            real = real + (tl.where(exists[None, :], xs[chunk], float("-inf")),)
        xs = real
    top = xs[0]
    for chunk in tl.static_range(1, CHUNKS):
        top = tl.maximum(top, xs[chunk])
    greatest = tl.max(top, axis=1)
    rate = tl.where(tl.abs(greatest) < 1073741824.0, LOG2_E, 1.0)
    shift = greatest * rate
    terms = ()
    total = tl.zeros_like(top)
    for chunk in tl.static_range(CHUNKS):
        term = term_of(xs[chunk], rate, shift)
        terms = terms + (term,)
        total += term
    return terms, rate, shift, tl.sum(total, axis=1)


@triton.jit
def term_of(x, rate, shift):
    """One term of `softmax_terms`; of any columns."""
    return tl.exp2(tl.fma(x, tl.broadcast_to(rate[:, None], x.shape), -tl.broadcast_to(shift[:, None], x.shape)))


@triton.jit
def logsumexp_of(rate, shift, total):
    """From what `softmax_terms` gave."""
    return (shift + tl.log2(total)) * tl.where(rate == 1.0, 1.0, LN_2)


@triton.jit
def activation_terms(xs, E: tl.constexpr, SCORE: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr):
    """(terms, total) of rows: CHUNKS [BLOCK_T, LANES] activations, 0 in columns that do not exist, and their sum + 1e-20."""
    terms = ()
    for chunk in tl.static_range(CHUNKS):
        expert, exists = columns(chunk * LANES, LANES, E, 0, 1)
        term = activation(xs[chunk], SCORE)
        if not EVEN:
            term = tl.where(exists[None, :], term, 0.0)
        terms = terms + (term,)
    total = terms[0]
    for chunk in tl.static_range(1, CHUNKS):
        total += terms[chunk]
    return terms, tl.sum(total, axis=1) + 1e-20


@triton.jit
def ordered(key):
    """An int32 that orders as `key` does, with NaN below -inf and -0.0 as +0.0."""
    bits = (key + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(key == key, bits, NAN_KEY)


@triton.jit
def unordered(bits):
    """The key again."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_groups(keys, E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """`keys` [BLOCK_T, LANES], LOWEST outside the CHOSEN_GROUPS best groups. A group's score is the sum of its best keys."""
    BLOCK_T: tl.constexpr = keys.shape[0]
    PADDED: tl.constexpr = keys.shape[1] // WIDTH
    SIZE: tl.constexpr = E // GROUPS
    SUMMED: tl.constexpr = K // CHOSEN_GROUPS if K // CHOSEN_GROUPS < SIZE else SIZE
    grouped = tl.reshape(keys, [BLOCK_T, PADDED, WIDTH])
    within = tl.arange(0, WIDTH)[None, None, :]
    left = grouped
    score = tl.zeros([BLOCK_T, PADDED], tl.float32)
    for _ in range(SUMMED):
        best = tl.max(left, axis=2)
        score += unordered(best)
        first = tl.min(tl.where(left == best[:, :, None], within, WIDTH), axis=2)
        left = tl.where(within == first[:, :, None], LOWEST, left)
    group = tl.arange(0, PADDED)[None, :]
    rank = tl.where(group < GROUPS, ordered(score), LOWEST)
    chosen = tl.zeros([BLOCK_T, PADDED], tl.int32)
    for _ in range(CHOSEN_GROUPS):
        best = tl.max(rank, axis=1)
        first = tl.min(tl.where((rank == best[:, None]) & (chosen == 0), group, PADDED), axis=1)
        taken = group == first[:, None]
        chosen = tl.where(taken, 1, chosen)
        rank = tl.where(taken, LOWEST, rank)
    return tl.reshape(tl.where(chosen[:, :, None] == 1, grouped, LOWEST), [BLOCK_T, PADDED * WIDTH])


@triton.jit
def keys_of(
    xs, bias, E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The ordered keys of logits, a tuple of CHUNKS [BLOCK_T, LANES]; LOWEST where no expert may be chosen.

    Without EXACT they are cheap: sigmoid is off by up to 4e-7, NaN counts as -inf and -0.0 less than +0.0.
    """
    keys = ()
    for chunk in tl.static_range(CHUNKS):
        expert, exists = columns(chunk * LANES, LANES, E, GROUPS, WIDTH)
        if SCORE == "sigmoid" and not EXACT:
            key = fast_sigmoid(xs[chunk])
        else:
            key = activation(xs[chunk], SCORE)
        if bias is not None:
            if EVEN:
                key += tl.load(bias + expert).to(tl.float32)[None, :]
            else:
                key += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)[None, :]
        if EXACT:
            key = ordered(key)
        else:
            # Not a maximum with -inf, whose NaN the interpreter keeps and a GPU drops.
            bits = tl.where(key == key, key, float("-inf")).to(tl.int32, bitcast=True)
            key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        if not EVEN:
            key = tl.where(exists[None, :], key, LOWEST)
        if GROUPS > 0:
            key = best_groups(key, E, K, GROUPS, CHOSEN_GROUPS, WIDTH)
        keys = keys + (key,)
    return keys


# --- selection --------------------------------------------------------------------------------------------------------------------


@triton.jit
def insert(best, new, DEPTH: tl.constexpr):
    """`best`, DEPTH tensors that descend in every lane, with `new` in its place and the last one dropped."""
    kept = ()
    for i in tl.static_range(DEPTH):
        kept = kept + (tl.maximum(best[i], new),)
        new = tl.minimum(best[i], new)
    return kept


@triton.jit
def take(best, DEPTH: tl.constexpr):
    """(winner [BLOCK_T], best without it): one choice."""
    winner = tl.max(best[0], axis=1)
    won = best[0] == winner[:, None]
    left = ()
    for i in tl.static_range(DEPTH - 1):
        left = left + (tl.where(won, best[i + 1], best[i]),)
    return winner, left + (tl.where(won, LOWEST, best[DEPTH - 1]),)


@triton.jit
def choose(
    xs, bias, E: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, SCORE: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """(packed, found, last, extra, emptied): the packed keys, the K greatest in order, the K-th, the one after it, and [BLOCK_T] 1
    where a lane may have had more to give.

    Packed: the key without its low log2(SPAN) bits, which hold SPAN - 1 - column. packed is a tuple of [BLOCK_T, LANES], found is
    [BLOCK_T, KEYS]. What may be wrong in this is for `settle` to see.
    """
    BLOCK_T: tl.constexpr = xs[0].shape[0]
    SPAN: tl.constexpr = triton.next_power_of_2(LANES * CHUNKS)
    keys = keys_of(xs, bias, E, K, SCORE, GROUPS, CHOSEN_GROUPS, WIDTH, LANES, CHUNKS, EVEN, GROUPS > 0)
    packed = ()
    best = ()
    for _ in tl.static_range(DEPTH):
        best = best + (tl.full([BLOCK_T, LANES], LOWEST, tl.int32),)
    for chunk in tl.static_range(CHUNKS):
        low = SPAN - 1 - chunk * LANES - tl.arange(0, LANES)
        pack = (keys[chunk] & -SPAN) | low[None, :]
        if not EVEN:
            pack = tl.where(keys[chunk] == LOWEST, LOWEST, pack)
        packed = packed + (pack,)
        best = insert(best, pack, DEPTH)
    slot = tl.arange(0, KEYS)[None, :]
    found = tl.full([BLOCK_T, KEYS], LOWEST, tl.int32)
    last = tl.full([BLOCK_T], LOWEST, tl.int32)
    if K <= UNROLLED:
        for choice in tl.static_range(K):
            last, best = take(best, DEPTH)
            found = tl.where(slot == choice, last[:, None], found)
    else:
        for choice in range(K):
            last, best = take(best, DEPTH)
            found = tl.where(slot == choice, last[:, None], found)
    extra = tl.max(best[0], axis=1)
    if DEPTH < CHUNKS and DEPTH < K + 1:
        emptied = tl.max((best[0] == LOWEST).to(tl.int32), axis=1)
    else:
        emptied = tl.zeros([BLOCK_T], tl.int32)
    return packed, found, last, extra, emptied


@triton.jit
def choose_exactly(keys, K: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr):
    """(columns [BLOCK_T, KEYS] of the K greatest keys in order, keys with those replaced by LOWEST), by whole keys."""
    BLOCK_T: tl.constexpr = keys[0].shape[0]
    slot = tl.arange(0, KEYS)[None, :]
    lane = tl.arange(0, LANES)[None, :]
    found = tl.full([BLOCK_T, KEYS], 0, tl.int32)
    for choice in range(K):
        best = keys[0]
        for chunk in tl.static_range(1, CHUNKS):
            best = tl.maximum(best, keys[chunk])
        best = tl.max(best, axis=1)[:, None]
        column = tl.full([BLOCK_T, LANES], CHUNKS * LANES, tl.int32)
        for chunk in tl.static_range(CHUNKS):
            column = tl.minimum(column, tl.where(keys[chunk] == best, chunk * LANES + lane, CHUNKS * LANES))
        column = tl.min(column, axis=1)[:, None]
        found = tl.where(slot == choice, column, found)
        left = ()
        for chunk in tl.static_range(CHUNKS):
            left = left + (tl.where(chunk * LANES + lane == column, LOWEST, keys[chunk]),)
        keys = left
    return found, keys


@triton.jit
def settle(
    choice, row_at, live, column_stride, bias, E: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, SCORE: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
    EVEN: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """(experts, logits, taken) from what `choose` gave: the K experts of each row by (key descending, expert ascending) and their
    logits, [BLOCK_T, KEYS] int32 and fp32, and a tuple of CHUNKS [BLOCK_T, LANES] int32 that are 1 where a column was chosen.

    Without ORDER, keys that differ by less than the bits that were replaced may stand in any order.
    """
    SPAN: tl.constexpr = triton.next_power_of_2(LANES * CHUNKS)
    CHEAP: tl.constexpr = GROUPS == 0 and SCORE == "sigmoid"
    packed, found, last, extra, emptied = choice
    slot = tl.arange(0, KEYS)[None, :]
    expert = tl.where(found == LOWEST, 0, expert_of(SPAN - 1 - (found & (SPAN - 1)), E, GROUPS, WIDTH))
    x = tl.load(row_at[:, None] + expert * column_stride, mask=live[:, None] & (slot < K), other=0.0).to(tl.float32)
    # The last one chosen and the best one left must differ by more than the bits that were replaced, and by what keys are off.
    if CHEAP:
        left = tl.maximum(unordered(extra | (SPAN - 1)), -3e38)
        # Not "at most": -inf, for which NaN counts here, gives NaN.
        cut = ~(unordered(last & -SPAN) > left + (2e-6 + tl.abs(left) * 5e-7)) & (extra != LOWEST)
    else:
        # Zeros are equal, but their signs put them on two sides of 0.
        cut = ((last ^ extra) & -SPAN == 0) | ((last < SPAN) & (extra >= -SPAN))
    doubtful = tl.maximum(cut.to(tl.int32), emptied)
    if ORDER:
        key = activation(x, SCORE)
        if bias is not None:
            key += tl.load(bias + expert, mask=slot < K, other=0.0).to(tl.float32)
        key = ordered(key)
        behind = tl.broadcast_to(tl.minimum(slot + 1, KEYS - 1), found.shape)
        next_key = tl.gather(key, behind, 1)
        disorder = (next_key > key) | ((next_key == key) & (tl.gather(expert, behind, 1) < expert))
        doubtful = tl.maximum(doubtful, tl.max((disorder & (slot < K - 1)).to(tl.int32), axis=1))
    doubtful *= live.to(tl.int32)
    taken = ()
    for chunk in tl.static_range(CHUNKS):
        taken = taken + ((packed[chunk] >= last[:, None]).to(tl.int32),)
    if tl.max(doubtful, axis=0) > 0:
        again = doubtful[:, None] == 1
        xs = load_rows(row_at, live, column_stride, E, GROUPS, WIDTH, LANES, CHUNKS, EVEN)
        keys = keys_of(xs, bias, E, K, SCORE, GROUPS, CHOSEN_GROUPS, WIDTH, LANES, CHUNKS, EVEN, True)
        column, left_keys = choose_exactly(keys, K, KEYS, LANES, CHUNKS)
        expert = tl.where(again, expert_of(column, E, GROUPS, WIDTH), expert)
        x = tl.load(row_at[:, None] + expert * column_stride, mask=live[:, None] & (slot < K), other=0.0).to(tl.float32)
        corrected = ()
        for chunk in tl.static_range(CHUNKS):
            was_taken = ((left_keys[chunk] == LOWEST) & (keys[chunk] != LOWEST)).to(tl.int32)
            corrected = corrected + (tl.where(again, was_taken, taken[chunk]),)
        taken = corrected
    return expert, x, taken


@triton.jit
def expert_of(column, E: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """The expert of a column: the same, but for groups of no power of two."""
    if GROUPS > 0:
        return column // WIDTH * (E // GROUPS) + column % WIDTH
    else:
        return column

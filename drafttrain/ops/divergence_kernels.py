"""The Triton kernel of the fused linear divergence: from both sides' logits to values and gradient.

    a program a row      pass 1   log-sum-exps, the drafter's likeliest token, both KLs      reads z, y
                         pass 2   acceptance and JS sums, which need the log-sum-exps        reads z, y (only if needed)
                         pass 3   the gradient, over z itself                                reads z, y, writes

z are the drafter's logits, y the target's, in any float dtype; sums run in float32. The set of
losses is known at compile time, their weights at run time. The formulas are those of
`losses/divergence.py`. Only `losses/fused.py` calls this.

Source: online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867); logits chunk by chunk with
the gradient written in place as in Liger-Kernel (Hsu et al. 2024, arXiv 2410.10989).
"""

import triton
import triton.language as tl

TINY = tl.constexpr(1e-12)
LOWEST = tl.constexpr(-1e4)
# Logit of columns past the end: probability zero, and products stay finite.
BEYOND = tl.constexpr(-1e20)


@triton.jit
def _read(base, cols, width, factor, TARGET: tl.constexpr):
    logits = tl.load(base + cols, mask=cols < width, other=0.0).to(tl.float32)
    if TARGET:
        logits = tl.maximum(logits, LOWEST)
    # Selected in float32: float16 cannot hold BEYOND.
    return tl.where(cols < width, logits * factor, BEYOND)


@triton.jit
def _log_mixture(log_p, log_q, beta):
    """log(beta p + (1 - beta) q)."""
    left = log_p + tl.log(beta)
    right = log_q + tl.log(1 - beta)
    top = tl.maximum(left, right)
    return top + tl.log(tl.exp(left - top) + tl.exp(right - top))


@triton.jit
def _online_sums(
    z, y, width, per_temperature, TARGET: tl.constexpr, KL: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass 1: both log-sum-exps, both KLs without them, and the drafter's likeliest token."""
    lanes = tl.arange(0, BLOCK)
    z_top = float("-inf")
    y_top = float("-inf")
    # A lane sums its own columns; `fade` rescales the sums when a block raises the maximum.
    z_sum = tl.zeros([BLOCK], tl.float32)
    y_sum = tl.zeros([BLOCK], tl.float32)
    kl_sum = tl.zeros([BLOCK], tl.float32)
    reverse_sum = tl.zeros([BLOCK], tl.float32)
    choice = 0  # first column of the highest z
    for start in range(0, width, BLOCK):
        cols = start + lanes
        zs = _read(z, cols, width, per_temperature, False)
        top = tl.max(zs, 0)
        choice = tl.where(
            top > z_top,
            tl.min(tl.where(zs == top, cols, width), 0),
            choice,
        )
        top = tl.maximum(top, z_top)
        fade = tl.exp(z_top - top)
        zs_exp = tl.exp(zs - top)
        z_sum = z_sum * fade + zs_exp
        z_top = top
        if TARGET:
            ys = _read(y, cols, width, per_temperature, True)
            if REVERSE:
                reverse_sum = reverse_sum * fade + zs_exp * (zs - ys)
            top = tl.maximum(y_top, tl.max(ys, 0))
            fade = tl.exp(y_top - top)
            ys_exp = tl.exp(ys - top)
            y_sum = y_sum * fade + ys_exp
            y_top = top
            if KL:
                kl_sum = kl_sum * fade + ys_exp * (ys - zs)
    z_total = tl.sum(z_sum, 0)
    y_total = tl.sum(y_sum, 0)
    log_z = z_top + tl.log(z_total)
    log_y = 0.0
    kl = 0.0
    if TARGET:
        log_y = y_top + tl.log(y_total)
        kl = tl.sum(kl_sum, 0) / y_total
    return log_z, log_y, kl, tl.sum(reverse_sum, 0) / z_total, choice


@triton.jit
def _acceptance_sums(
    z, y, width, per_temperature, log_z, log_y, full, beta, FULL: tl.constexpr, JS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass 2: alpha, the mean reward of total variation, and both KLs of Jensen-Shannon."""
    lanes = tl.arange(0, BLOCK)
    alpha_sum = tl.zeros([BLOCK], tl.float32)
    mean_sum = tl.zeros([BLOCK], tl.float32)
    p_sum = tl.zeros([BLOCK], tl.float32)
    q_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        log_q = _read(z, cols, width, per_temperature, False) - log_z
        ys = _read(y, cols, width, per_temperature, True)
        q = tl.exp(log_q)
        if FULL:
            p_full = tl.exp(ys - full)
            alpha_sum += tl.minimum(p_full, q)
            mean_sum += tl.where(q < p_full, q, 0.0)
        if JS:
            log_p = ys - log_y
            log_m = _log_mixture(log_p, log_q, beta)
            p_sum += tl.exp(log_p) * (log_p - log_m)
            q_sum += q * (log_q - log_m)
    return tl.sum(alpha_sum, 0), tl.sum(mean_sum, 0), tl.sum(p_sum, 0), tl.sum(q_sum, 0)


@triton.jit
def divergence_rows(
    z, y, grad, values, alphas, agrees, full_log_z, likeliest, sampled, row_weight, z_stride, y_stride, grad_stride,
    width, per_temperature, kl_weight, reverse_weight, js_weight, tv_weight, tvn_weight, lka_weight, lkl_weight, ce_weight,
    beta, eta,
    KL: tl.constexpr, REVERSE: tl.constexpr, JS: tl.constexpr, ACCEPT: tl.constexpr, CE: tl.constexpr,
    MEASURE: tl.constexpr, GRAD: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one row's value and gradient.

    KL, REVERSE, JS, ACCEPT (tv, tvd++, both lk) and CE name the terms that have a weight; lk_lambda
    needs KL too. Writes values and grad if GRAD (adds to them if ADD), alphas and agrees if MEASURE.
    """
    TARGET: tl.constexpr = KL or REVERSE or JS or ACCEPT or MEASURE
    SECOND: tl.constexpr = JS or ACCEPT or MEASURE
    row = tl.program_id(0).to(tl.int64)
    z += row * z_stride
    y += row * y_stride
    grad += row * grad_stride
    lanes = tl.arange(0, BLOCK)

    log_z, log_y, kl, reverse_kl, choice = _online_sums(
        z,
        y,
        width,
        per_temperature,
        TARGET,
        KL,
        REVERSE,
        BLOCK,
    )
    full = 0.0
    if ACCEPT or MEASURE:
        full = tl.load(full_log_z + row)

    alpha = 0.0
    mean = 0.0
    from_p = 0.0
    from_q = 0.0
    if SECOND:
        alpha, mean, from_p, from_q = _acceptance_sums(
            z,
            y,
            width,
            per_temperature,
            log_z,
            log_y,
            full,
            beta,
            ACCEPT or MEASURE,
            JS,
            BLOCK,
        )
    if MEASURE:
        tl.store(alphas + row, alpha)
        tl.store(agrees + row, choice == tl.load(likeliest + row))
    if GRAD:
        # The factors are constant in the row: sums of the terms that share a gradient.
        value = 0.0
        kl_factor = kl_weight
        tv_factor = tv_weight
        ce_factor = ce_weight
        reverse = 0.0
        label = -1
        if ACCEPT:
            bounded = tl.maximum(alpha, TINY)
            lam = tl.exp(-eta * alpha)
            kl_factor += lkl_weight * lam
            rejected = tv_weight + tvn_weight + lkl_weight * (1 - lam)
            value += rejected * (1 - alpha) - lka_weight * tl.log(bounded)
            tv_factor += tvn_weight * tl.rsqrt(tl.maximum(mean * (1 - mean), TINY))
            tv_factor += lka_weight / bounded + lkl_weight * (1 - lam)
        if KL:
            value += kl_factor * (kl - log_y + log_z)
        if REVERSE:
            reverse = reverse_kl - log_z + log_y
            value += reverse_weight * reverse
        if JS:
            value += js_weight * (beta * from_p + (1 - beta) * from_q)
        if CE:
            label = tl.load(sampled + row)
            ce_factor = tl.where(label >= 0, ce_weight, 0.0)
            chosen = tl.load(z + tl.maximum(label, 0)).to(tl.float32) * per_temperature
            value += ce_factor * (log_z - chosen)
            # every warp has read the label's logit before any writes the gradient over it
            tl.debug_barrier()
        if ADD:
            value += tl.load(values + row)
        tl.store(values + row, value)

        # Pass 3.
        scale = tl.load(row_weight + row) * per_temperature
        for start in range(0, width, BLOCK):
            cols = start + lanes
            log_q = _read(z, cols, width, per_temperature, False) - log_z
            q = tl.exp(log_q)
            slope = tl.zeros([BLOCK], tl.float32)
            if TARGET:
                ys = _read(y, cols, width, per_temperature, True)
                log_p = ys - log_y
                if KL:
                    slope += kl_factor * (q - tl.exp(log_p))
                if REVERSE:
                    slope += reverse_weight * q * (log_q - log_p - reverse)
                if JS:
                    log_ratio = log_q - _log_mixture(log_p, log_q, beta)
                    slope += js_weight * (1 - beta) * q * (log_ratio - from_q)
                if ACCEPT:
                    slope += tv_factor * q * (mean - tl.where(q < tl.exp(ys - full), 1.0, 0.0))
            if CE:
                slope += ce_factor * (q - tl.where(cols == label, 1.0, 0.0))
            slope *= scale
            if ADD:
                slope += tl.load(grad + cols, mask=cols < width, other=0.0).to(tl.float32)
            tl.store(
                grad + cols,
                slope.to(grad.dtype.element_ty),
                mask=cols < width,
            )

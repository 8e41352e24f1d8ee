/* Decoding kernels for CPUs: RMS norm, top-k, moves in a cache. cpu_linear.c adds linear layers, cpu_layers.c attention and full
 * layers; the latter includes the others.
 *
 * GCC/Clang vector extensions, so the compiler selects the machine's instructions. Everything is float32, rows are contiguous.
 * The order of a row's sums does not depend on the other rows: a token gets the same bits whether it is decoded alone or
 * verified in a tree (with an equally long prefix). No function keeps state: threads may call them at once. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define LANES 16

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int64_t longs __attribute__((vector_size(4 * LANES)));
typedef uint32_t quad __attribute__((vector_size(16)));

#ifdef __clang__
#define shuffle(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define shuffle(a, b, ...) __builtin_shuffle(a, b, (quad){__VA_ARGS__})
#endif

static inline long min(long a, long b) { return a < b ? a : b; }
static inline long max(long a, long b) { return a > b ? a : b; }

/* -- vectors -------------------------------------------------------------------------------------------------------- */

static inline vec load(const float *at) {
    vec v;
    memcpy(&v, at, sizeof v);
    return v;
}

static inline void store(float *at, vec v) { memcpy(at, &v, sizeof v); }

/* mask ? a : b, lane by lane, for masks as comparisons of vectors give them. */
static inline vec choose(ints mask, vec a, vec b) { return (vec)(((ints)a & mask) | ((ints)b & ~mask)); }

/* The larger or smaller of a and b, lane by lane; b where one is no number. */
static inline vec larger(vec a, vec b) {
#ifdef __AVX512F__
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

static inline vec smaller(vec a, vec b) {
#ifdef __AVX512F__
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return choose(a < b, a, b);
#endif
}

/* e^x to a few float32 roundings, 0 below -87, e^88 above 88: 2^n p(r), |r| <= ln(2) / 2, p the Taylor polynomial of degree 6. */
static inline vec exponential(vec x) {
    ints tiny = x < -87.0f;
    x = larger((vec){0} - 87.0f, smaller((vec){0} + 88.0f, x));
    vec n = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    n -= 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln(2) in two parts */
    vec p = 1.0f + r * (0.166666667f + r * (0.0416666667f + r * (8.33333333e-3f + r * 1.38888889e-3f))) * r * r;
    p += r + 0.5f * r * r;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return (vec)((ints)(p * (vec)power) & ~tiny);
}

enum activation { NONE, SILU, GELU }; /* GELU by tanh: 0.5 a (1 + tanh(t)) = a sigmoid(2 t) */

static inline vec activate(vec a, enum activation kind) {
    vec t = kind == GELU ? 1.5957691216f * (a + 0.044715f * a * a * a) : a;
    return a / (1.0f + exponential(-t));
}

/* -- normalization -------------------------------------------------------------------------------------------------- */

/* y = x / sqrt(mean(x^2) + eps) * weight, row by row. */
void rms_norm(const float *x, const float *weight, float eps, float *y, long rows, long width) {
    for (long r = 0; r < rows; r++, x += width, y += width) {
        float sums[LANES] = {0}, total = 0;
        long i = 0;
        for (; i + LANES <= width; i += LANES)
            for (int l = 0; l < LANES; l++) sums[l] += x[i + l] * x[i + l];
        for (; i < width; i++) total += x[i] * x[i];
        for (int l = 0; l < LANES; l++) total += sums[l];
        float scale = 1.0f / sqrtf(total / width + eps);
        for (i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
    }
}

/* -- top-k ----------------------------------------------------------------------------------------------------------- */

/* Whether any of the next SPAN numbers is above the limit. */
#define SPAN (4 * LANES)
static inline int any_above(const float *z, float limit) {
    ints above = {0};
    for (int j = 0; j < SPAN; j += LANES) {
        __builtin_prefetch((const char *)(z + j) + 4096);
        above |= load(z + j) > limit;
    }
    longs pairs = (longs)above;
    int64_t any = 0;
    for (int l = 0; l < LANES / 2; l++) any |= pairs[l];
    return any != 0;
}

/* Top-k of each row of logits [rows, d]: ids and values [rows, k], descending, equal values by index; and log_sum [rows], the
 * logarithm of the summed exponentials, unless NULL. One thread: a round needs a few rows of some thousand tokens, for which
 * waking another core takes longer than the work. */
void likeliest(const float *z, long rows, long d, long k, int64_t *ids, float *values, float *log_sum) {
    for (long r = 0; r < rows; r++, z += d, ids += k, values += k) {
        long held = 0, i = 0;
        while (i < d) {
            int whole = held == k && i + SPAN <= d;
            if (whole && !any_above(z + i, values[k - 1])) { /* most spans */
                i += SPAN;
                continue;
            }
            for (long end = whole ? i + SPAN : i + 1; i < end; i++) {
                if (held == k && !(z[i] > values[k - 1])) continue;
                long place = held < k ? held++ : k - 1;
                for (; place > 0 && z[i] > values[place - 1]; place--) {
                    values[place] = values[place - 1];
                    ids[place] = ids[place - 1];
                }
                values[place] = z[i];
                ids[place] = i;
            }
        }
        if (log_sum == NULL) continue;
        float highest = values[0], sums = 0;
        vec total = {0};
        for (i = 0; i + LANES <= d; i += LANES) total += exponential(load(z + i) - highest);
        for (; i < d; i++) sums += expf(z[i] - highest);
        for (int l = 0; l < LANES; l++) sums += total[l];
        log_sum[r] = highest + logf(sums);
    }
}

/* -- slots of a cache ----------------------------------------------------------------------------------------------- */

static void fetch(const char *at, long width) {
    for (long i = 0; i < width; i += 64) __builtin_prefetch(at + i);
}

/* Copies slots of `count` buffers [heads, slots, width] to others, pair by pair (goal, source), so that a slot may be a source
 * before it is a goal. Strides and width in bytes. A forward has evicted the slots from the core's caches, and each one is too
 * short for the hardware to predict the next: hence the prefetches. */
void move_slots(char *const *buffers, long count, long heads, long head_stride, long slot_stride, long width,
                const int64_t *pairs, long moved) {
    for (long b = 0; b < count; b++)
        for (long h = 0; h < heads; h++)
            for (long i = 0; i < moved; i++) {
                long at = h * head_stride, goal = at + pairs[2 * i] * slot_stride, source = at + pairs[2 * i + 1] * slot_stride;
                if (b + 1 < count) fetch(buffers[b + 1] + goal, width), fetch(buffers[b + 1] + source, width);
                memcpy(buffers[b] + goal, buffers[b] + source, width);
            }
}

/* Decoding kernels for CPUs: linear layers for few rows, RMS norm, top-k, moves in a cache. cpu_layers.c includes this file and
 * builds attention and full layers on it.
 *
 * GCC/Clang vector extensions, so the compiler selects the machine's instructions. Everything is float32, rows are contiguous.
 * The order of a row's sums does not depend on the other rows: a token gets the same bits whether it is decoded alone or
 * verified in a tree (with an equally long prefix). No function keeps state: threads may call them at once. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define PANEL (2 * LANES)
#ifdef __AVX512F__
#define MAX_ROWS 12 /* 24 sums, 2 weights and a broadcast in 32 registers */
#else
#define MAX_ROWS 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef int64_t longs __attribute__((vector_size(4 * LANES)));

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

/* e^x to a few float32 roundings, 0 below -87, e^88 above 88: 2^n p(r), |r| <= ln(2) / 2, p the Taylor polynomial of degree 6. */
static inline vec exponential(vec x) {
    ints tiny = x < -87.0f;
    x = choose(tiny, (vec){0}, choose(x > 88.0f, (vec){0} + 88.0f, x));
    vec n = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    n -= 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln(2) in two parts */
    vec p = 1.0f + r * (0.166666667f + r * (0.0416666667f + r * (8.33333333e-3f + r * 1.38888889e-3f))) * r * r;
    p += r + 0.5f * r * r;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return choose(tiny, (vec){0}, p * (vec)power);
}

enum activation { NONE, SILU, GELU }; /* GELU by tanh: 0.5 a (1 + tanh(t)) = a sigmoid(2 t) */

static inline vec activate(vec a, enum activation kind) {
    vec t = kind == GELU ? 1.5957691216f * (a + 0.044715f * a * a * a) : a;
    return a / (1.0f + exponential(-t));
}

/* -- linear ---------------------------------------------------------------------------------------------------------
 *
 * y = x W^T for few rows: every weight is read from memory once, whatever the number of rows. W [out, in] is stored in panels
 * of 32 outputs, [out/32][in][32], so that a core streams one panel from front to back and keeps the sums of up to MAX_ROWS rows
 * in registers. bfloat16 panels interleave outputs i and i+16 in one 32-bit word: a shift and a mask widen both exactly. int8
 * panels end with a float32 factor per output, which multiplies the finished sums. */
enum format { FLOAT32, BFLOAT16, INT8 }; /* as in ops/packing.py */

#define AHEAD 4096 /* bytes of prefetching; 2 to 8 KiB measure alike, a quarter faster than the hardware's own */

static inline void load_bfloat16(const void *panel, long i, vec *low, vec *high) {
    const float *at = (const float *)panel + i * LANES;
    __builtin_prefetch((const char *)at + AHEAD);
    words pair = (words)load(at);
    *low = (vec)(pair << 16);
    *high = (vec)(pair & 0xffff0000u);
}

static inline void load_float32(const void *panel, long i, vec *low, vec *high) {
    const float *at = (const float *)panel + i * PANEL;
    __builtin_prefetch((const char *)at + AHEAD);
    __builtin_prefetch((const char *)(at + LANES) + AHEAD);
    *low = load(at);
    *high = load(at + LANES);
}

static inline vec from_bytes(const char *at) {
#ifdef __AVX512F__ /* one instruction, which GCC does not generate from the generic form */
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)at)));
#else
    bytes numbers;
    memcpy(&numbers, at, sizeof numbers);
    return __builtin_convertvector(__builtin_convertvector(numbers, shorts), vec);
#endif
}

static inline void load_int8(const void *panel, long i, vec *low, vec *high) {
    const char *at = (const char *)panel + i * PANEL;
    __builtin_prefetch(at + AHEAD);
    *low = from_bytes(at);
    *high = from_bytes(at + LANES);
}

/* `rows` is a constant in every call, so the loops over rows unroll and the sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(
    int rows, void (*load)(const void *, long, vec *, vec *), const float *x, long in, const void *panel, float *y) {
    vec low[MAX_ROWS], high[MAX_ROWS];
    for (int r = 0; r < rows; r++) low[r] = high[r] = (vec){0};
    for (long i = 0; i < in; i++) {
        vec a, b;
        load(panel, i, &a, &b);
        for (int r = 0; r < rows; r++) {
            low[r] += a * x[r * in + i];
            high[r] += b * x[r * in + i];
        }
    }
    for (int r = 0; r < rows; r++) store(y + r * PANEL, low[r]), store(y + r * PANEL + LANES, high[r]);
}

#define CASE(R, LOAD) case R: multiply(R, LOAD, x, in, panel, y); break;
#define FOUR(A, B, C, D, LOAD) CASE(A, LOAD) CASE(B, LOAD) CASE(C, LOAD) CASE(D, LOAD)
#if MAX_ROWS == 12
#define MORE(LOAD) FOUR(5, 6, 7, 8, LOAD) FOUR(9, 10, 11, 12, LOAD)
#else
#define MORE(LOAD)
#endif
#define DISPATCH(NAME, LOAD)                                                           \
    static void NAME(int rows, const float *x, long in, const void *panel, float *y) { \
        switch (rows) { FOUR(1, 2, 3, 4, LOAD) MORE(LOAD) }                            \
    }
DISPATCH(multiply_bfloat16, load_bfloat16)
DISPATCH(multiply_float32, load_float32)
DISPATCH(multiply_int8, load_int8)

static long panel_bytes(long in, int format) {
    return in * PANEL * (format == INT8 ? 1 : format == BFLOAT16 ? 2 : 4) + (format == INT8 ? PANEL * (long)sizeof(float) : 0);
}

/* The products of up to MAX_ROWS rows with one panel: tile [rows, PANEL]. */
static void multiply_panel(int rows, const float *x, long in, const char *panel, int format, float *tile) {
    if (format == BFLOAT16) multiply_bfloat16(rows, x, in, panel, tile);
    else if (format == FLOAT32) multiply_float32(rows, x, in, panel, tile);
    else {
        const float *factor = (const void *)(panel + in * PANEL);
        multiply_int8(rows, x, in, panel, tile);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < PANEL; i++) tile[r * PANEL + i] *= factor[i];
    }
}

/* Blocks of nearly equal size: 16 rows are 8 + 8, not 12 + 4. */
static int next_rows(long rows, long done) {
    long blocks = (rows - done + MAX_ROWS - 1) / MAX_ROWS;
    return (int)((rows - done + blocks - 1) / blocks);
}

/* y [rows, out] = x [rows, in] W^T, or gated: act(gate(x)) * up(x), where panels of gate and up alternate, so that both products
 * are in the core's own cache when they are multiplied. The last panel of each matrix is padded. */
static void linear(const float *x, long rows, long in, const void *panels, int format, float *y, long out, enum activation act,
                   int threads) {
    long count = (out + PANEL - 1) / PANEL, size = panel_bytes(in, format);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long p = 0; p < count; p++) {
        float tile[MAX_ROWS * PANEL], up[MAX_ROWS * PANEL];
        const char *panel = (const char *)panels + (act ? 2 : 1) * p * size;
        long width = min(out - p * PANEL, PANEL);
        for (long done = 0, m; done < rows; done += m) {
            m = next_rows(rows, done);
            multiply_panel((int)m, x + done * in, in, panel, format, tile);
            if (act) multiply_panel((int)m, x + done * in, in, panel + size, format, up);
            for (long i = 0; act && i < m * PANEL; i += LANES) store(tile + i, activate(load(tile + i), act) * load(up + i));
            for (long r = 0; r < m; r++)
                memcpy(y + (done + r) * out + p * PANEL, tile + r * PANEL, width * sizeof(float));
        }
    }
}

void skinny_linear(const float *x, long rows, long in, const void *panels, int format, float *y, long out, int threads) {
    linear(x, rows, in, panels, format, y, out, NONE, threads);
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
        __builtin_prefetch((const char *)(z + j) + AHEAD);
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

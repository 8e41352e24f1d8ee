/* Decoding's kernels for CPUs: linear layers for few rows, RMS norm, attention over a prefix and a token tree.
 *
 * GCC/Clang vector extensions, so the compiler picks the machine's instructions. Everything is float32, rows are
 * contiguous. Sums over a row run in an order that does not depend on the other rows: what a token gets is the same to
 * the bit whether it is decoded alone or verified in a tree (the prefix being equally long). */
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

/* -- linear ---------------------------------------------------------------------------------------------------------
 *
 * y = x W^T for few rows: every weight is read from memory once, whatever the number of rows. W [out, in] comes in
 * panels of 32 outputs, [out/32][in][32], so that a core streams one panel from front to back and keeps the sums of up
 * to MAX_ROWS rows in registers. bfloat16 panels interleave outputs i and i+16 in one 32-bit word: a shift and a mask
 * widen both exactly. int8 panels end with a float32 factor per output, which the finished sums are multiplied by. */
enum format { FLOAT32, BFLOAT16, INT8 }; /* as in ops/packing.py */

/* Bytes ahead of the multiplication that weights are asked for; measured, 2 to 8 KiB are alike and a quarter faster than
 * the hardware's own prefetching. */
#define AHEAD 4096

static inline void load_bfloat16(const void *panel, long i, vec *low, vec *high) {
    const char *at = (const char *)panel + i * 2 * PANEL;
    words pair;
    __builtin_prefetch(at + AHEAD);
    memcpy(&pair, at, sizeof pair);
    words l = pair << 16, h = pair & 0xffff0000u;
    memcpy(low, &l, sizeof l);
    memcpy(high, &h, sizeof h);
}

static inline void load_float32(const void *panel, long i, vec *low, vec *high) {
    const char *at = (const char *)panel + i * 4 * PANEL;
    __builtin_prefetch(at + AHEAD);
    __builtin_prefetch(at + AHEAD + sizeof *low);
    memcpy(low, at, sizeof *low);
    memcpy(high, at + sizeof *low, sizeof *high);
}

static inline vec from_bytes(const char *at) {
#ifdef __AVX512F__ /* one instruction, which GCC does not find by itself */
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
    for (int r = 0; r < rows; r++) {
        memcpy(y + r * PANEL, &low[r], sizeof(vec));
        memcpy(y + r * PANEL + LANES, &high[r], sizeof(vec));
    }
}

#define CASE(R, LOAD) \
    case R: multiply(R, LOAD, x, in, panel, y); break;
#if MAX_ROWS == 12
#define MORE(LOAD) CASE(5, LOAD) CASE(6, LOAD) CASE(7, LOAD) CASE(8, LOAD) \
    CASE(9, LOAD) CASE(10, LOAD) CASE(11, LOAD) CASE(12, LOAD)
#else
#define MORE(LOAD)
#endif
#define DISPATCH(NAME, LOAD)                                                                   \
    static void NAME(int rows, const float *x, long in, const void *panel, float *y) {         \
        switch (rows) { CASE(1, LOAD) CASE(2, LOAD) CASE(3, LOAD) CASE(4, LOAD) MORE(LOAD) }   \
    }
DISPATCH(multiply_bfloat16, load_bfloat16)
DISPATCH(multiply_float32, load_float32)
DISPATCH(multiply_int8, load_int8)

static void scale(int rows, const void *factors, float *y) {
    vec low, high;
    memcpy(&low, factors, sizeof low);
    memcpy(&high, (const char *)factors + sizeof low, sizeof high);
    for (int r = 0; r < rows; r++, y += PANEL) {
        vec a, b;
        memcpy(&a, y, sizeof a);
        memcpy(&b, y + LANES, sizeof b);
        a *= low, b *= high;
        memcpy(y, &a, sizeof a);
        memcpy(y + LANES, &b, sizeof b);
    }
}

static long panel_bytes(long in, int format) {
    return in * PANEL * (format == INT8 ? 1 : format == BFLOAT16 ? 2 : 4) + (format == INT8 ? PANEL * (long)sizeof(float) : 0);
}

/* The products of up to MAX_ROWS rows with one panel: tile [rows, PANEL]. */
static void multiply_panel(int rows, const float *x, long in, const char *panel, int format, float *tile) {
    if (format == BFLOAT16) multiply_bfloat16(rows, x, in, panel, tile);
    else if (format == FLOAT32) multiply_float32(rows, x, in, panel, tile);
    else {
        multiply_int8(rows, x, in, panel, tile);
        scale(rows, panel + in * PANEL, tile);
    }
}

/* Blocks of nearly equal size: 16 rows are 8 + 8, not 12 + 4. */
static int next_rows(long rows, long done) {
    long blocks = (rows - done + MAX_ROWS - 1) / MAX_ROWS;
    return (int)((rows - done + blocks - 1) / blocks);
}

/* x [rows, in], y [rows, out] float32, row-major; panels as above, the last one padded. */
void skinny_linear(const float *x, long rows, long in, const void *panels, int format, float *y, long out, int threads) {
    long count = (out + PANEL - 1) / PANEL, size = panel_bytes(in, format);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long p = 0; p < count; p++) {
        float tile[MAX_ROWS * PANEL];
        long width = out - p * PANEL < PANEL ? out - p * PANEL : PANEL;
        for (long done = 0, m; done < rows; done += m) {
            m = next_rows(rows, done);
            multiply_panel((int)m, x + done * in, in, (const char *)panels + p * size, format, tile);
            for (long r = 0; r < m; r++)
                memcpy(y + (done + r) * out + p * PANEL, tile + r * PANEL, width * sizeof(float));
        }
    }
}

/* -- normalisation -------------------------------------------------------------------------------------------------- */

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

/* -- vectors -------------------------------------------------------------------------------------------------------- */

/* mask ? a : b, lane by lane; comparisons of vectors give such masks. */
static inline vec choose(ints mask, vec a, vec b) { return (vec)(((ints)a & mask) | ((ints)b & ~mask)); }

/* e^x to a few float32 roundings, 0 below -87, e^88 above 88: 2^n p(r) with |r| <= ln(2) / 2 and p the Taylor polynomial of degree 6. */
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

/* -- the likeliest tokens -------------------------------------------------------------------------------------------- */

/* Whether any of the next SPAN numbers is above the limit. */
#define SPAN (4 * LANES)
static inline int any_above(const float *z, float limit) {
    ints above = {0};
    for (int j = 0; j < SPAN; j += LANES) {
        vec block;
        __builtin_prefetch((const char *)(z + j) + AHEAD);
        memcpy(&block, z + j, sizeof block);
        above |= block > limit;
    }
    longs pairs = (longs)above;
    int64_t any = 0;
    for (int l = 0; l < LANES / 2; l++) any |= pairs[l];
    return any != 0;
}

/* Per row of logits [rows, d] the k highest, falling, equal ones by index: ids and values [rows, k], and, unless `log_sum`
 * is null, the logarithm of the row's summed exponentials. One thread: a round asks for a few rows of some thousand
 * tokens, for which waking another core takes longer than the work. */
void likeliest(const float *z, long rows, long d, long k, int64_t *ids, float *values, float *log_sum) {
    for (long r = 0; r < rows; r++, z += d, ids += k, values += k) {
        long held = 0, i = 0;
        while (i < d) {
            int whole = held == k && i + SPAN <= d;
            if (whole && !any_above(z + i, values[k - 1])) { /* as in most spans */
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
        for (i = 0; i + LANES <= d; i += LANES) {
            vec block;
            memcpy(&block, z + i, sizeof block);
            total += exponential(block - highest);
        }
        for (; i < d; i++) sums += expf(z[i] - highest);
        for (int l = 0; l < LANES; l++) sums += total[l];
        log_sum[r] = highest + logf(sums);
    }
}

/* -- slots of a cache ----------------------------------------------------------------------------------------------- */

static void fetch(const char *at, long width) {
    for (long i = 0; i < width; i += 64) __builtin_prefetch(at + i);
}

/* Copies slots of `count` buffers [heads, slots, width] to others, pair by pair (goal, source), so that a slot may be a
 * source before it is a goal. Strides and width in bytes. A pass has pushed the slots out of the core's caches, and each one
 * is too short for the hardware to see what comes next. */
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

/* -- tree attention ------------------------------------------------------------------------------------------------- */

/* out[i][c ..] = sum of weights[t][i] * value[t] / total for four rows i, of which `high` exist; `wide` is a constant. */
static inline __attribute__((always_inline)) void weigh(int wide, const float *weights, const float *value, long count,
                                                        long ve, int high, float *const *out, long c, vec total, int r) {
    vec sum[4][4] = {{{0}}};
    for (long t = 0; t < count; t++, value += ve, weights += LANES)
        for (int j = 0; j < wide; j++) {
            __builtin_prefetch(value + 16 * ve + j * LANES);
            vec v;
            memcpy(&v, value + j * LANES, sizeof v);
            for (int i = 0; i < 4; i++) sum[i][j] += v * weights[i];
        }
    for (int i = 0; i < high; i++)
        for (int j = 0; j < wide; j++) {
            vec mean = sum[i][j] / total[r + i];
            memcpy(out[i] + c + j * LANES, &mean, sizeof mean);
        }
}

/* One key head and up to LANES of its query rows (row = query head of the group, new token). Scores lie key by key, a
 * lane per row: the query is transposed once, and every key and value is read once. */
static void attend_rows(const float *query[LANES], float *out[LANES], const int *token, int rows, const float *sinks,
                        const float *key, const float *value, long first, long prefix, long n, long e, long ve,
                        const uint64_t *ancestors, const int *depth, float scaling, long window, float softcap,
                        vec *transposed, vec *scores) {
    for (long c = 0; c < e; c++)
        for (int r = 0; r < LANES; r++) transposed[c][r] = r < rows ? query[r][c] * scaling : 0.0f;
    vec highest = (vec){0} - INFINITY;
    for (int r = 0; r < rows; r++) if (sinks) highest[r] = sinks[r];
    long end = prefix + n;
    for (long t = first; t < end; t += 8) { /* eight sums at once keep the multipliers busy */
        for (long c = 0; c < 8 * e; c += LANES) __builtin_prefetch(key + (t + 16) * e + c);
        vec s[8] = {{0}};
        const float *k[8];
        for (int j = 0; j < 8; j++) k[j] = key + (t + j < end ? t + j : end - 1) * e;
        for (long c = 0; c < e; c++) {
            vec q = transposed[c];
            for (int j = 0; j < 8; j++) s[j] += q * k[j][c];
        }
        for (int j = 0; j < 8 && t + j < end; j++) {
            if (softcap > 0) s[j] = softcap - 2 * softcap / (exponential(s[j] * (2 / softcap)) + 1);
            long new = t + j - prefix; /* which of the new tokens this key is; negative in the prefix */
            if (new >= 0 || window)
                for (int r = 0; r < rows; r++) {
                    long at = new >= 0 ? prefix + depth[new] : t + j;
                    int unseen = new >= 0 && !(ancestors[token[r]] >> new & 1);
                    if (unseen || (window && prefix + depth[token[r]] - at >= window)) s[j][r] = -INFINITY;
                }
            scores[t + j] = s[j];
            highest = choose(s[j] > highest, s[j], highest);
        }
    }
    vec total = {0};
    for (long t = first; t < end; t++) {
        scores[t] = exponential(scores[t] - highest);
        total += scores[t];
    }
    for (int r = 0; r < rows; r++) if (sinks) total[r] += expf(sinks[r] - highest[r]);
    for (int r = 0; r < rows; r += 4)
        for (long c = 0, wide; c < ve; c += wide * LANES) {
            wide = (ve - c) / LANES;
            wide = wide < 4 ? wide : 4;
            int high = rows - r < 4 ? rows - r : 4;
            const float *weights = (const float *)(scores + first) + r;
            switch (wide) {
                case 4: weigh(4, weights, value + first * ve + c, end - first, ve, high, out + r, c, total, r); break;
                case 3: weigh(3, weights, value + first * ve + c, end - first, ve, high, out + r, c, total, r); break;
                case 2: weigh(2, weights, value + first * ve + c, end - first, ve, high, out + r, c, total, r); break;
                default: weigh(1, weights, value + first * ve + c, end - first, ve, high, out + r, c, total, r);
            }
        }
}

/* One sequence of a packed batch: its first slot on the cache's slot axis, committed keys, first new token, new tokens;
 * tokens of its tree that earlier passes stored behind the prefix, and where its tree begins in ancestors and depth. */
struct part {
    long slot, prefix, token, n, held, node;
};

static void append(float *cache, long cache_stride, const float *new, long head_stride, long token_stride, long kv_heads,
                   const struct part *part, long width) {
    for (long kv = 0; kv < kv_heads; kv++)
        for (long i = 0; i < part->n; i++)
            memcpy(cache + kv * cache_stride + (part->slot + part->prefix + part->held + i) * width,
                   new + kv * head_stride + (part->token + i) * token_stride, width * sizeof(float));
}

/* Attention of each part's n new tokens over its committed keys and over their own ancestors (a bit per token of the tree,
 * held + n <= 64 of them).
 *
 * query [heads, N, e], new_key [kv_heads, N, e], new_value [kv_heads, N, ve] by strides; new keys and values are stored
 * first (NULL: they are in place). keys [kv_heads, slots, e], values [kv_heads, slots, ve] with a stride per head; out
 * [N, heads, ve]. e and ve are multiples of 16; ancestors, depth per tree token; window 0, softcap 0, sinks NULL: none. */
void tree_attention(const float *query, long head_stride, long token_stride, const float *new_key, long new_key_head,
                    long new_key_token, const float *new_value, long new_value_head, long new_value_token, float *keys,
                    long key_stride, float *values, long value_stride, float *out, long heads, long kv_heads, long e,
                    long ve, const struct part *parts, long count, const uint64_t *ancestors, const int *depth,
                    float scaling, long window, float softcap, const float *sinks, int threads) {
    long group = heads / kv_heads, blocks = 0, slots = 0;
    for (long p = 0; p < count; p++) {
        const struct part *part = parts + p;
        if (new_key) append(keys, key_stride, new_key, new_key_head, new_key_token, kv_heads, part, e);
        if (new_value) append(values, value_stride, new_value, new_value_head, new_value_token, kv_heads, part, ve);
        long needed = (group * part->n + LANES - 1) / LANES, seen = part->prefix + part->held + part->n;
        blocks = needed > blocks ? needed : blocks;
        slots = seen > slots ? seen : slots;
    }
    /* Blocks of one key head go to one thread, whose cache then holds the keys. */
    long tasks = count * kv_heads * blocks, chunk = count == 1 ? (tasks + threads - 1) / threads : blocks;
#pragma omp parallel num_threads(threads) if (tasks > 1)
    {
        vec *transposed = aligned_alloc(sizeof(vec), (e + slots) * sizeof(vec)), *scores = transposed + e;
#pragma omp for schedule(dynamic, chunk)
        for (long task = 0; task < tasks; task++) {
            const struct part *part = parts + task / (kv_heads * blocks);
            long kv = task / blocks % kv_heads, block = task % blocks, n = part->n;
            long rows = group * n, own = (rows + LANES - 1) / LANES;
            if (block >= own) continue;
            long begin = rows * block / own, size = rows * (block + 1) / own - begin;
            long first = window && part->prefix + 1 > window ? part->prefix + 1 - window : 0;
            const float *queries[LANES];
            float *outs[LANES], sink[LANES];
            int token[LANES];
            for (long i = 0; i < size; i++) {
                long head = kv * group + (begin + i) / n;
                long fresh = (begin + i) % n;
                token[i] = (int)(part->held + fresh);
                queries[i] = query + head * head_stride + (part->token + fresh) * token_stride;
                outs[i] = out + ((part->token + fresh) * heads + head) * ve;
                if (sinks) sink[i] = sinks[head];
            }
            attend_rows(queries, outs, token, (int)size, sinks ? sink : 0, keys + kv * key_stride + part->slot * e,
                        values + kv * value_stride + part->slot * ve, first, part->prefix, part->held + n, e,
                        ve, ancestors + part->node, depth + part->node, scaling, window, softcap, transposed, scores);
        }
        free(transposed);
    }
}

/* -- decoder layer -------------------------------------------------------------------------------------------------- */

/* The parts of a pre-norm decoder layer around its attention. NULL: not there. Mirrored in ops/decoder_layer.py. */
struct layer {
    const void *qkv, *o, *gate_up, *down; /* panels; query, key and value rows joined, gate and up panels in turn */
    const float *qkv_bias, *input_norm, *query_norm, *key_norm, *attended_norm, *mlp_norm, *mlp_out_norm;
    int qkv_format, o_format, gate_up_format, down_format;
    int width, hidden, heads, kv_heads, head_dim, rotary_dim, inner, gelu; /* width: columns of qkv */
    float eps;
};

static void rotate(float *x, const float *cosine, const float *sine, int dim) {
    for (int i = 0, half = dim / 2; i < half; i++) {
        float left = x[i], right = x[i + half];
        x[i] = left * cosine[i] - right * sine[i];
        x[i + half] = right * cosine[i + half] + left * sine[i + half];
    }
}

/* x [n, width] -> qkv [n, (heads + 2 kv_heads) head_dim], rotated; cosine, sine [n, rotary_dim]. */
void layer_before_attention(const struct layer *layer, const float *x, long n, const float *cosine, const float *sine,
                            float *qkv, int threads) {
    int e = layer->head_dim, turned = layer->heads + layer->kv_heads;
    long width = (long)(turned + layer->kv_heads) * e;
    float *normed = layer->input_norm ? malloc(n * layer->width * sizeof(float)) : 0;
    if (normed) rms_norm(x, layer->input_norm, layer->eps, normed, n, layer->width);
    skinny_linear(normed ? normed : x, n, layer->width, layer->qkv, layer->qkv_format, qkv, width, threads);
    free(normed);
    for (long r = 0; r < n; r++) {
        float *row = qkv + r * width;
        if (layer->qkv_bias) for (long i = 0; i < width; i++) row[i] += layer->qkv_bias[i];
        if (layer->query_norm) rms_norm(row, layer->query_norm, layer->eps, row, layer->heads, e);
        if (layer->key_norm) rms_norm(row + layer->heads * e, layer->key_norm, layer->eps, row + layer->heads * e, layer->kv_heads, e);
        for (int head = 0; head < turned; head++)
            rotate(row + head * e, cosine + r * layer->rotary_dim, sine + r * layer->rotary_dim, layer->rotary_dim);
    }
}

/* silu(a) = a sigmoid(a); gelu by tanh: 0.5 a (1 + tanh(t)) = a sigmoid(2 t) */
static inline vec activate(vec a, int gelu) {
    vec t = gelu ? 1.5957691216f * (a + 0.044715f * a * a * a) : a;
    return a / (1.0f + exponential(-t));
}

/* y [rows, inner] = act(gate(x)) * up(x). Panels of gate and of up take turns, so that a core finds what it has just computed
 * in its own cache, and nothing but y is written. */
static void gated_linear(const float *x, long rows, long in, const void *panels, int format, float *y, long inner, int gelu,
                         int threads) {
    long count = (inner + PANEL - 1) / PANEL, size = panel_bytes(in, format);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long p = 0; p < count; p++) {
        float gate[MAX_ROWS * PANEL], up[MAX_ROWS * PANEL];
        const char *panel = (const char *)panels + 2 * p * size;
        long width = inner - p * PANEL < PANEL ? inner - p * PANEL : PANEL;
        for (long done = 0, m; done < rows; done += m) {
            m = next_rows(rows, done);
            multiply_panel((int)m, x + done * in, in, panel, format, gate);
            multiply_panel((int)m, x + done * in, in, panel + size, format, up);
            for (long i = 0; i < m * PANEL; i += LANES) {
                vec a, b;
                memcpy(&a, gate + i, sizeof a);
                memcpy(&b, up + i, sizeof b);
                a = activate(a, gelu) * b;
                memcpy(gate + i, &a, sizeof a);
            }
            for (long r = 0; r < m; r++)
                memcpy(y + (done + r) * inner + p * PANEL, gate + r * PANEL, width * sizeof(float));
        }
    }
}

/* x [n, hidden] += o(attended [n, heads head_dim]); x += mlp(norm(x)), norms after the blocks where the layer has them. */
void layer_after_attention(const struct layer *layer, float *x, const float *attended, long n, int threads) {
    long hidden = layer->hidden, inner = layer->inner, count = n * hidden;
    float *block = malloc((2 * count + n * inner) * sizeof(float)), *normed = block + count, *active = normed + count;
    skinny_linear(attended, n, (long)layer->heads * layer->head_dim, layer->o, layer->o_format, block, hidden, threads);
    if (layer->attended_norm) rms_norm(block, layer->attended_norm, layer->eps, block, n, hidden);
    for (long i = 0; i < count; i++) x[i] += block[i];
    rms_norm(x, layer->mlp_norm, layer->eps, normed, n, hidden);
    gated_linear(normed, n, hidden, layer->gate_up, layer->gate_up_format, active, inner, layer->gelu, threads);
    skinny_linear(active, n, inner, layer->down, layer->down_format, block, hidden, threads);
    if (layer->mlp_out_norm) rms_norm(block, layer->mlp_out_norm, layer->eps, block, n, hidden);
    for (long i = 0; i < count; i++) x[i] += block[i];
    free(block);
}

/* -- body ----------------------------------------------------------------------------------------------------------- */

/* How a layer attends, and where its keys and values are. Mirrored in ops/decoder_layer.py. */
struct attention {
    float *keys, *values;
    const float *sinks;
    long key_stride, value_stride, window, table; /* table: which rotary table it reads */
    float scaling, softcap;
};

/* All layers over x [n, hidden], in place: a pass of few tokens spends as long in Python between 90 kernels as in them.
 *
 * tables: per rotary table cosine and sine [n, rotary_dim]. wanted [features]: ascending layers whose input is copied to
 * `caught`, a row of which holds `features` states side by side; `count` stands for the last layer's output. */
void body_forward(const struct layer *const *layers, const struct attention *attention, long count, float *x, long n,
                  const float *const *tables, const struct part *parts, long part_count, const uint64_t *ancestors,
                  const int *depth, const long *wanted, long features, float *caught, int threads) {
    long widest = 0, hidden = layers[0]->hidden, next = 0;
    for (long i = 0; i < count; i++) {
        long width = (long)(2 * layers[i]->heads + 2 * layers[i]->kv_heads) * layers[i]->head_dim;
        widest = width > widest ? width : widest;
    }
    float *qkv = malloc(n * widest * sizeof(float));
    for (long i = 0; i <= count; i++) {
        for (; next < features && wanted[next] == i; next++)
            for (long r = 0; r < n; r++)
                memcpy(caught + (r * features + next) * hidden, x + r * hidden, hidden * sizeof(float));
        if (i == count) break;
        const struct layer *layer = layers[i];
        const struct attention *a = attention + i;
        long e = layer->head_dim, width = (layer->heads + 2L * layer->kv_heads) * e;
        float *key = qkv + layer->heads * e, *value = key + layer->kv_heads * e, *attended = qkv + n * width;
        layer_before_attention(layer, x, n, tables[2 * a->table], tables[2 * a->table + 1], qkv, threads);
        tree_attention(qkv, e, width, key, e, width, value, e, width, a->keys, a->key_stride, a->values, a->value_stride,
                       attended, layer->heads, layer->kv_heads, e, e, parts, part_count, ancestors, depth, a->scaling,
                       a->window, a->softcap, a->sinks, threads);
        layer_after_attention(layer, x, attended, n, threads);
    }
    free(qkv);
}

/* -- drafting ------------------------------------------------------------------------------------------------------- */

/* A drafter of decoder layers. NULL: not there. Mirrored in ops/draft_step.py. */
struct draft {
    const struct layer *const *layers;
    const float *embed_norm, *state_norm, *norm; /* of what is read, and of the last layer's output */
    const void *project, *head;                  /* panels: of what is read, joined, to a state; of the output to logits */
    int count, beside, hidden, project_format, head_format, hands_on_normed; /* beside: width of an embedding */
    long vocabulary;
    float eps;
};

/* One depth for n tokens of one sequence: embeds [n, beside] and states [n, hidden] -> out [n, hidden], which the next depth
 * reads, and logits [asking, vocabulary] of the last tokens. Where nothing projects, the first layer reads embedding and
 * state side by side. cosine, sine [positions, rotary_dim]; keys and values per layer, a stride per head; `part`, ancestors
 * and depths as tree_attention takes them. */
void draft_step(const struct draft *d, const float *embeds, const float *states, long n, const float *cosine, const float *sine,
                float *const *keys, float *const *values, long stride, const struct part *part, const uint64_t *ancestors,
                const int *depths, long window, float *out, float *logits, long asking, int threads) {
    long e = d->layers[0]->head_dim, heads = d->layers[0]->heads, kv_heads = d->layers[0]->kv_heads;
    long turned = d->layers[0]->rotary_dim, hidden = d->hidden, joined = d->beside + hidden, width = (heads + 2 * kv_heads) * e;
    float *read = malloc(n * (joined + 2 * turned + width + heads * e + hidden) * sizeof(float)), *cosines = read + n * joined;
    float *sines = cosines + n * turned, *qkv = sines + n * turned, *attended = qkv + n * width, *normed = attended + n * heads * e;
    for (long r = 0; r < n; r++) {
        float *row = read + r * joined;
        long at = part->prefix + depths[part->held + r];
        memcpy(row, embeds + r * d->beside, d->beside * sizeof(float));
        memcpy(row + d->beside, states + r * hidden, hidden * sizeof(float));
        if (d->embed_norm) rms_norm(row, d->embed_norm, d->eps, row, 1, d->beside);
        if (d->state_norm) rms_norm(row + d->beside, d->state_norm, d->eps, row + d->beside, 1, hidden);
        memcpy(cosines + r * turned, cosine + at * turned, turned * sizeof(float));
        memcpy(sines + r * turned, sine + at * turned, turned * sizeof(float));
    }
    if (d->project) skinny_linear(read, n, joined, d->project, d->project_format, out, hidden, threads);
    else memcpy(out, states, n * hidden * sizeof(float));
    for (int i = 0; i < d->count; i++) {
        const float *key = qkv + heads * e, *value = key + kv_heads * e;
        layer_before_attention(d->layers[i], i || d->project ? out : read, n, cosines, sines, qkv, threads);
        tree_attention(qkv, e, width, key, e, width, value, e, width, keys[i], stride, values[i], stride, attended, heads,
                       kv_heads, e, e, part, 1, ancestors, depths, 1 / sqrtf(e), window, 0, NULL, threads);
        layer_after_attention(d->layers[i], out, attended, n, threads);
    }
    if (d->norm) rms_norm(out, d->norm, d->eps, normed, n, hidden);
    if (d->hands_on_normed) memcpy(out, normed, n * hidden * sizeof(float));
    skinny_linear((d->norm ? normed : out) + (n - asking) * hidden, asking, hidden, d->head, d->head_format, logits,
                  d->vocabulary, threads);
    free(read);
}

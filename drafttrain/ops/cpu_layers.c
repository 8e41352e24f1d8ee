/* Attention over a prefix and a token tree, and what is built on it and on the kernels of cpu.c and cpu_linear.c: decoder layers,
 * all layers of a target. cpu_draft.c includes this file. */
#include "cpu.c"

#include "cpu_linear.c"

/* -- tree attention ------------------------------------------------------------------------------------------------- */

/* One sequence of a packed batch. slot: its first one on the cache's slot axis; prefix: committed keys; token: its first new
 * token; n: new tokens; held: tokens of its tree that earlier forwards stored behind the prefix; node: begin of its tree in ancestors
 * and depth. */
struct part { long slot, prefix, token, n, held, node; };

/* Where the new tokens of a forward stand: a part per sequence, and per token of all trees its ancestors (bit j: token j of its
 * tree, or itself) and its depth. Mirrored in tree_attention.py. */
struct plan {
    const struct part *parts;
    long count;
    const uint64_t *ancestors;
    const int *depth;
};

/* out[i][c ..] = sum over t of weights[t][i] * value[t] / total, for four rows i, of which `high` exist; `wide` is a constant. */
static inline __attribute__((always_inline)) void weigh(int wide, const float *weights, const float *value, long count,
                                                        long ve, int high, float *const *out, long c, vec total, int r) {
    vec sum[4][4] = {{{0}}};
    for (long t = 0; t < count; t++, value += ve, weights += LANES)
        for (int j = 0; j < wide; j++) {
            __builtin_prefetch(value + 16 * ve + j * LANES);
            vec v = load(value + j * LANES);
            for (int i = 0; i < 4; i++) sum[i][j] += v * weights[i];
        }
    for (int i = 0; i < high; i++)
        for (int j = 0; j < wide; j++) store(out[i] + c + j * LANES, sum[i][j] / total[r + i]);
}

/* One key head and up to LANES of its query rows (row = query head of the group, new token). Scores are stored key by key, a lane
 * per row: the query is transposed once, and every key and value is read once. */
static void attend_rows(const float *query[LANES], float *out[LANES], const int *token, int rows, const float *sinks,
                        const float *key, const float *value, const struct part *part, const struct plan *plan, long e, long ve,
                        float scaling, long window, float softcap, vec *transposed, vec *scores) {
    const uint64_t *ancestors = plan->ancestors + part->node;
    const int *depth = plan->depth + part->node;
    long prefix = part->prefix, end = prefix + part->held + part->n;
    long first = window && prefix + 1 > window ? prefix + 1 - window : 0; /* the first key that any row sees */
    for (long c = 0; c < e; c++)
        for (int r = 0; r < LANES; r++) transposed[c][r] = r < rows ? query[r][c] * scaling : 0.0f;
    vec highest = (vec){0} - INFINITY;
    ints low = {0}, high = {0}, place = {0}; /* of each row: its ancestors' bits and its position */
    low -= 1, high -= 1, place += INT32_MIN / 2; /* lanes without a row see everything */
    for (int r = 0; r < rows; r++) {
        highest[r] = sinks[r];
        low[r] = (int32_t)ancestors[token[r]], high[r] = (int32_t)(ancestors[token[r]] >> 32);
        place[r] = (int32_t)(prefix + depth[token[r]]);
    }
    for (long t = first; t < end; t += 8) { /* eight sums at once keep the multipliers busy */
        for (long c = 0; c < 8 * e; c += LANES) __builtin_prefetch(key + (t + 16) * e + c);
        vec s[8] = {{0}};
        const float *k[8];
        for (int j = 0; j < 8; j++) k[j] = key + min(t + j, end - 1) * e;
        for (long c = 0; c < e; c++) {
            vec q = transposed[c];
            for (int j = 0; j < 8; j++) s[j] += q * k[j][c];
        }
        for (int j = 0; j < 8 && t + j < end; j++) {
            if (softcap > 0) s[j] = softcap - 2 * softcap / (exponential(s[j] * (2 / softcap)) + 1);
            long new = t + j - prefix; /* which of the new tokens this key is; negative in the prefix */
            ints hidden = {0};
            if (new >= 0) hidden = ((new < 32 ? low : high) >> (new & 31) & 1) == 0;
            if (window) hidden |= place - (int)(new >= 0 ? prefix + depth[new] : t + j) >= (int)min(window, INT32_MAX);
            s[j] = choose(hidden, (vec){0} - INFINITY, s[j]);
            scores[t + j] = s[j];
            highest = choose(s[j] > highest, s[j], highest);
        }
    }
    vec total = {0};
    for (long t = first; t < end; t++) {
        scores[t] = exponential(scores[t] - highest);
        total += scores[t];
    }
    for (int r = 0; r < rows; r++) total[r] += expf(sinks[r] - highest[r]); /* 0 without a sink: every token sees itself */
    for (int r = 0; r < rows; r += 4)
        for (long c = 0, wide; c < ve; c += wide * LANES) {
            wide = min((ve - c) / LANES, 4);
            int high = (int)min(rows - r, 4);
            const float *weights = (const float *)(scores + first) + r;
#define WEIGH(N) case N: weigh(N, weights, value + first * ve + c, end - first, ve, high, out + r, c, total, r); break;
            switch (wide) { WEIGH(4) WEIGH(3) WEIGH(2) WEIGH(1) }
        }
}

static void append(float *cache, long cache_stride, const float *new, long head_stride, long token_stride, long kv_heads,
                   const struct part *part, long width) {
    for (long kv = 0; kv < kv_heads; kv++)
        for (long i = 0; i < part->n; i++)
            memcpy(cache + kv * cache_stride + (part->slot + part->prefix + part->held + i) * width,
                   new + kv * head_stride + (part->token + i) * token_stride, width * sizeof(float));
}

/* Attention of each part's n new tokens over its committed keys and their own ancestors (a bit per token of the tree, held + n of
 * them, at most 64).
 *
 * query [heads, N, e], new_key [kv_heads, N, e], new_value [kv_heads, N, ve] by strides; new keys and values are stored first
 * (NULL: they are stored already). keys [kv_heads, slots, e], values [kv_heads, slots, ve] with a stride per head; out [N, heads,
 * ve]. e and ve are multiples of 16; window 0, softcap 0, sinks NULL: none. */
void tree_attention(const float *query, long head_stride, long token_stride, const float *new_key, long new_key_head,
                    long new_key_token, const float *new_value, long new_value_head, long new_value_token, float *keys,
                    long key_stride, float *values, long value_stride, float *out, long heads, long kv_heads, long e,
                    long ve, const struct plan *plan, float scaling, long window, float softcap, const float *sinks, int threads) {
    long group = heads / kv_heads, blocks = 0, slots = 0, count = plan->count;
    for (long p = 0; p < count; p++) {
        const struct part *part = plan->parts + p;
        if (new_key) append(keys, key_stride, new_key, new_key_head, new_key_token, kv_heads, part, e);
        if (new_value) append(values, value_stride, new_value, new_value_head, new_value_token, kv_heads, part, ve);
        blocks = max(blocks, (group * part->n + LANES - 1) / LANES);
        slots = max(slots, part->prefix + part->held + part->n);
    }
    /* One thread computes the blocks of one key head, so that its cache holds the keys. */
    long tasks = count * kv_heads * blocks, chunk = max(1, count == 1 ? (tasks + threads - 1) / threads : blocks);
#pragma omp parallel num_threads(threads) if (tasks > 1)
    {
        vec *transposed = aligned_alloc(sizeof(vec), (e + slots) * sizeof(vec)), *scores = transposed + e;
#pragma omp for schedule(dynamic, chunk)
        for (long task = 0; task < tasks; task++) {
            const struct part *part = plan->parts + task / (kv_heads * blocks);
            long kv = task / blocks % kv_heads, block = task % blocks, n = part->n;
            long rows = group * n, own = (rows + LANES - 1) / LANES;
            if (block >= own) continue;
            long begin = rows * block / own, size = rows * (block + 1) / own - begin;
            const float *queries[LANES];
            float *outs[LANES], sink[LANES];
            int token[LANES];
            for (long i = 0; i < size; i++) {
                long head = kv * group + (begin + i) / n, fresh = (begin + i) % n;
                token[i] = (int)(part->held + fresh);
                queries[i] = query + head * head_stride + (part->token + fresh) * token_stride;
                outs[i] = out + ((part->token + fresh) * heads + head) * ve;
                sink[i] = sinks ? sinks[head] : -INFINITY;
            }
            attend_rows(queries, outs, token, (int)size, sink, keys + kv * key_stride + part->slot * e,
                        values + kv * value_stride + part->slot * ve, part, plan, e, ve, scaling, window, softcap, transposed,
                        scores);
        }
        free(transposed);
    }
}

/* -- decoder layer -------------------------------------------------------------------------------------------------- */

/* A pre-norm decoder layer around its attention. NULL: not there. Mirrored in cpu_layers.py. */
struct layer {
    const void *qkv, *o, *gate_up, *down; /* panels; query, key and value rows joined, gate and up panels alternating */
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

#define SHARED_ROWS 16 /* from here on the work on rows is worth waking other threads */

/* x [n, width] -> qkv [n, (heads + 2 kv_heads) head_dim], rotated; cosine, sine [n, rotary_dim]. */
void layer_before_attention(const struct layer *layer, const float *x, long n, const float *cosine, const float *sine,
                            float *qkv, int threads) {
    int e = layer->head_dim, rotated = layer->heads + layer->kv_heads;
    long width = (long)(rotated + layer->kv_heads) * e, read = layer->width;
    float *normed = layer->input_norm ? malloc(n * read * sizeof(float)) : 0;
#pragma omp parallel for num_threads(threads) if (n >= SHARED_ROWS)
    for (long r = 0; r < (normed ? n : 0); r++) rms_norm(x + r * read, layer->input_norm, layer->eps, normed + r * read, 1, read);
    skinny_linear(normed ? normed : x, n, read, layer->qkv, layer->qkv_format, qkv, width, threads);
    free(normed);
#pragma omp parallel for num_threads(threads) if (n >= SHARED_ROWS)
    for (long r = 0; r < n; r++) {
        float *row = qkv + r * width;
        if (layer->qkv_bias) for (long i = 0; i < width; i++) row[i] += layer->qkv_bias[i];
        float *key = row + layer->heads * e;
        if (layer->query_norm) rms_norm(row, layer->query_norm, layer->eps, row, layer->heads, e);
        if (layer->key_norm) rms_norm(key, layer->key_norm, layer->eps, key, layer->kv_heads, e);
        for (int head = 0; head < rotated; head++)
            rotate(row + head * e, cosine + r * layer->rotary_dim, sine + r * layer->rotary_dim, layer->rotary_dim);
    }
}

/* x [n, width] += block, normalized by `weight` unless NULL. */
static void add_block(float *x, float *block, const float *weight, float eps, long n, long width, int threads) {
#pragma omp parallel for num_threads(threads) if (n >= SHARED_ROWS)
    for (long r = 0; r < n; r++) {
        if (weight) rms_norm(block + r * width, weight, eps, block + r * width, 1, width);
        for (long i = r * width; i < (r + 1) * width; i++) x[i] += block[i];
    }
}

/* x [n, hidden] += o(attended [n, heads head_dim]); x += mlp(norm(x)), norms after the blocks where the layer has them. */
void layer_after_attention(const struct layer *layer, float *x, const float *attended, long n, int threads) {
    long hidden = layer->hidden, inner = layer->inner, count = n * hidden;
    float *block = malloc((2 * count + n * inner) * sizeof(float)), *normed = block + count, *active = normed + count;
    skinny_linear(attended, n, (long)layer->heads * layer->head_dim, layer->o, layer->o_format, block, hidden, threads);
    add_block(x, block, layer->attended_norm, layer->eps, n, hidden, threads);
#pragma omp parallel for num_threads(threads) if (n >= SHARED_ROWS)
    for (long r = 0; r < n; r++) rms_norm(x + r * hidden, layer->mlp_norm, layer->eps, normed + r * hidden, 1, hidden);
    enum activation act = layer->gelu ? GELU : SILU;
    linear(normed, n, hidden, layer->gate_up, layer->gate_up_format, active, inner, act, threads);
    skinny_linear(active, n, inner, layer->down, layer->down_format, block, hidden, threads);
    add_block(x, block, layer->mlp_out_norm, layer->eps, n, hidden, threads);
    free(block);
}

/* -- body ----------------------------------------------------------------------------------------------------------- */

/* How a layer attends; table: the rotary table that it reads. Mirrored in cpu_layers.py. */
struct form { const float *sinks; long window, table; float scaling, softcap; };

/* A layer's slots in a cache: keys and values [kv_heads, slots, e] with a stride per head, in numbers. */
struct buffers { float *keys, *values; long key_stride, value_stride; };

/* read [n, width] -> x [n, hidden], which is added to; scratch [n, (2 heads + 2 kv_heads) head_dim]. */
static void full_layer(const struct layer *layer, const struct form *form, const struct buffers *b, const float *read, float *x,
                       long n, const float *cosine, const float *sine, const struct plan *plan, float *scratch, int threads) {
    long e = layer->head_dim, width = (layer->heads + 2L * layer->kv_heads) * e;
    float *key = scratch + layer->heads * e, *value = key + layer->kv_heads * e, *attended = scratch + n * width;
    layer_before_attention(layer, read, n, cosine, sine, scratch, threads);
    tree_attention(scratch, e, width, key, e, width, value, e, width, b->keys, b->key_stride, b->values, b->value_stride,
                   attended, layer->heads, layer->kv_heads, e, e, plan, form->scaling, form->window, form->softcap, form->sinks,
                   threads);
    layer_after_attention(layer, x, attended, n, threads);
}

/* All layers over x [n, hidden], in place. Called layer by layer, a forward of few tokens spends as long in Python as here.
 *
 * tables: cosine and sine [n, rotary_dim] per rotary table. wanted [features]: ascending layers whose inputs are copied to
 * caught [n, features, hidden]; `count` means the last layer's output. norm [hidden]: also the last norm, to last [n, hidden],
 * and with a head its products, logits [n, vocabulary]; NULL for neither. */
void body_forward(const struct layer *const *layers, const struct form *forms, const struct buffers *buffers, long count, float *x,
                  long n, const float *const *tables, const struct plan *plan, const long *wanted, long features, float *caught,
                  const float *norm, float eps, float *last, const void *head, int format, float *logits, long vocabulary,
                  int threads) {
    long widest = 0, hidden = layers[0]->hidden, next = 0;
    for (long i = 0; i < count; i++)
        widest = max(widest, 2L * (layers[i]->heads + layers[i]->kv_heads) * layers[i]->head_dim);
    float *scratch = malloc(n * widest * sizeof(float));
    for (long i = 0; i <= count; i++) {
        for (; next < features && wanted[next] == i; next++)
            for (long r = 0; r < n; r++)
                memcpy(caught + (r * features + next) * hidden, x + r * hidden, hidden * sizeof(float));
        if (i == count) break;
        const float *const *pair = tables + 2 * forms[i].table;
        full_layer(layers[i], forms + i, buffers + i, x, x, n, pair[0], pair[1], plan, scratch, threads);
    }
    free(scratch);
    if (norm) rms_norm(x, norm, eps, last, n, hidden);
    if (head) skinny_linear(last, n, hidden, head, format, logits, vocabulary, threads);
}

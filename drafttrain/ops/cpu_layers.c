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

/* A row is a query head of one new token. What it sees stands in the order of positions: the prefix, then its ancestors, whatever
 * their slots. Positions are cut at multiples of STRETCH; the maximum, the sum and the output of a stretch are computed apart from
 * the others and merged in order. So a row gets the bits that plain decoding gives it, with any number of rows, siblings or threads. */
#define STRETCH 256

/* What attention computes with, of all parts. */
struct attention {
    const struct plan *plan;
    const float *query, *sinks;
    const float *keys, *values;
    long head_stride, token_stride, key_stride, value_stride; /* of query, keys and values */
    float *out;
    long heads, kv_heads, e, ve, window;
    float scaling, softcap;
};

/* What a row has gathered: its highest score, the sum of its weights below that, and its weighted values [ve]. */
struct gathered { float highest, total, out[]; };

/* out[i][c ..] += sum over t of weights[t][i] * value[t], for four rows i, of which `high` exist; `wide` is a constant. */
static inline __attribute__((always_inline)) void weigh(int wide, const float *weights, const float *value, long count,
                                                        long ve, int high, struct gathered *const *out, long c) {
    vec sum[4][4] = {{{0}}};
    for (long t = 0; t < count; t++, value += ve, weights += LANES)
        for (int j = 0; j < wide; j++) {
            __builtin_prefetch(value + 16 * ve + j * LANES);
            vec v = load(value + j * LANES);
            for (int i = 0; i < 4; i++) sum[i][j] += v * weights[i];
        }
    for (int i = 0; i < high; i++)
        for (int j = 0; j < wide; j++) store(out[i]->out + c + j * LANES, sum[i][j]);
}

/* As `weigh`, of one row and of tokens that stand anywhere. */
static inline __attribute__((always_inline)) void weigh_tokens(int wide, const float *weights, const float *const *value, int count,
                                                               float *out, long c) {
    vec sum[4];
    for (int j = 0; j < wide; j++) sum[j] = load(out + c + j * LANES);
    for (int t = 0; t < count; t++)
        for (int j = 0; j < wide; j++) sum[j] += load(value[t] + c + j * LANES) * weights[t];
    for (int j = 0; j < wide; j++) store(out + c + j * LANES, sum[j]);
}

/* Products of eight keys [e] with all rows, a lane per row; eight sums at once keep the multipliers busy. */
static inline __attribute__((always_inline)) void score_keys(const vec *transposed, const float *const *key, long e, vec *scores) {
    vec sum[8] = {{0}};
    for (long c = 0; c < e; c++) {
        vec q = transposed[c];
        for (int j = 0; j < 8; j++) sum[j] += q * key[j][c];
    }
    for (int j = 0; j < 8; j++) scores[j] = sum[j];
}

/* The stretches [from, to) in which a part's rows see anything. */
struct stretches { long from, to; };

static struct stretches stretches_of(const struct attention *a, const struct part *part) {
    long first = a->window ? max(0, part->prefix + 1 - a->window) : 0, end = part->prefix + part->held + part->n;
    return (struct stretches){first / STRETCH, (end + STRETCH - 1) / STRETCH};
}

/* The scaled queries [e] of up to LANES rows from `begin` on (row = query head of the group, new token), a lane per row. */
static void transpose_queries(const struct attention *a, const struct part *part, long kv, long begin, int rows, vec *transposed) {
    for (int r = 0; r < LANES; r++) {
        long head = kv * (a->heads / a->kv_heads) + (begin + r) / part->n, fresh = (begin + r) % part->n;
        const float *query = a->query + head * a->head_stride + (part->token + fresh) * a->token_stride;
        for (long c = 0; c < a->e; c++) transposed[c][r] = r < rows ? query[c] * a->scaling : 0.0f;
    }
}

/* One part, key head and stretch of positions, for the rows of `transpose_queries`. Scores are stored position by position, a lane
 * per row, and every key and value of the prefix is read once. */
static void attend_stretch(const struct attention *a, const struct part *part, long kv, long stretch, long begin, int rows,
                           const vec *transposed, struct gathered *const *gathered) {
    const uint64_t *ancestors = a->plan->ancestors + part->node;
    const int *depth = a->plan->depth + part->node;
    long e = a->e, ve = a->ve, prefix = part->prefix, base = stretch * STRETCH;
    const float *key = a->keys + kv * a->key_stride + part->slot * e, *value = a->values + kv * a->value_stride + part->slot * ve;
    /* Keys of the prefix: [from, to) in the stretch; with a window from the first that any row sees. */
    long first = a->window ? max(0, prefix + 1 - a->window) : 0;
    long from = min(max(first - base, 0), STRETCH), to = max(min(prefix - base, STRETCH), from), end = to;
    vec scores[STRETCH], highest = (vec){0} - INFINITY, total = {0};
    ints oldest = {0}; /* of each row: the first place in the stretch that its window holds */
    uint64_t seen[LANES] = {0}, any = 0; /* the tree's tokens that a row sees in this stretch */

    for (int r = 0; r < rows; r++) {
        long fresh = (begin + r) % part->n;
        long place = prefix + depth[part->held + fresh], least = a->window ? place + 1 - a->window - base : 0;
        oldest[r] = (int32_t)min(max(least, 0), STRETCH);
        for (uint64_t rest = ancestors[part->held + fresh]; rest; rest &= rest - 1) {
            int j = __builtin_ctzll(rest);
            long t = prefix + depth[j] - base;
            if (t < oldest[r] || t < 0 || t >= STRETCH) continue;
            seen[r] |= 1ull << j;
            end = max(end, t + 1);
        }
        any |= seen[r];
    }
    for (long t = to; t < end; t++) scores[t] = (vec){0} - INFINITY;

    const float *read = key + base * e, *k[8];
    vec products[8];
    for (long t = from; t < to; t += 8) {
        for (long c = 0; c < 8 * e; c += LANES) __builtin_prefetch(read + (t + 16) * e + c);
        for (int j = 0; j < 8; j++) k[j] = read + min(t + j, to - 1) * e;
        score_keys(transposed, k, e, products);
        for (int j = 0; j < 8 && t + j < to; j++) scores[t + j] = choose(oldest > (int)(t + j), (vec){0} - INFINITY, products[j]);
    }
    while (any) {
        int token[8], count = 0;
        for (; any && count < 8; any &= any - 1) token[count++] = __builtin_ctzll(any);
        for (int j = 0; j < 8; j++) k[j] = key + (prefix + token[min(j, count - 1)]) * e;
        score_keys(transposed, k, e, products);
        for (int j = 0; j < count; j++)
            for (int r = 0; r < rows; r++)
                if (seen[r] >> token[j] & 1) scores[prefix + depth[token[j]] - base][r] = products[j][r];
    }
    for (long t = from; t < end; t++) {
        vec s = scores[t];
        if (a->softcap > 0) {
            vec capped = a->softcap - 2 * a->softcap / (exponential(s * (2 / a->softcap)) + 1);
            scores[t] = choose(s == (vec){0} - INFINITY, s, capped);
        }
        highest = choose(scores[t] > highest, scores[t], highest);
    }
    vec below = choose(highest == (vec){0} - INFINITY, (vec){0}, highest); /* a row may see nothing here */
    for (long t = from; t < end; t++) {
        scores[t] = exponential(scores[t] - below);
        total += scores[t];
    }
    for (int r = 0; r < rows; r++) gathered[r]->highest = highest[r], gathered[r]->total = total[r];
    for (int r = 0; r < rows; r += 4)
        for (long c = 0, wide; c < ve; c += wide * LANES) {
            wide = min((ve - c) / LANES, 4);
            const float *weights = (const float *)(scores + from) + r;
#define WEIGH(N) case N: weigh(N, weights, value + (base + from) * ve + c, to - from, ve, (int)min(rows - r, 4), gathered + r, c); break;
            switch (wide) { WEIGH(4) WEIGH(3) WEIGH(2) WEIGH(1) }
        }
    for (int r = 0; r < rows; r++) {
        const float *values[64];
        float weights[64];
        int count = 0;
        for (uint64_t rest = seen[r]; rest; rest &= rest - 1, count++) {
            int j = __builtin_ctzll(rest);
            values[count] = value + (prefix + j) * ve;
            weights[count] = scores[prefix + depth[j] - base][r];
        }
        for (long c = 0, wide; c < (count ? ve : 0); c += wide * LANES) {
            wide = min((ve - c) / LANES, 4);
#define WEIGH_TOKENS(N) case N: weigh_tokens(N, weights, values, count, gathered[r]->out, c); break;
            switch (wide) { WEIGH_TOKENS(4) WEIGH_TOKENS(3) WEIGH_TOKENS(2) WEIGH_TOKENS(1) }
        }
    }
}

/* Adds a stretch to what a row gathered of those before it. */
static void merge(struct gathered *all, const struct gathered *next, long ve) {
    if (next->highest == -INFINITY) return;
    float highest = next->highest > all->highest ? next->highest : all->highest;
    float before = expf(all->highest - highest), now = expf(next->highest - highest);
    all->total = all->total * before + next->total * now;
    for (long c = 0; c < ve; c += LANES) store(all->out + c, load(all->out + c) * before + load(next->out + c) * now);
    all->highest = highest;
}

/* What a row has before the first stretch: its sink, if there is one. */
static void begin_row(const struct attention *a, const struct part *part, long kv, long row, struct gathered *all) {
    all->highest = a->sinks ? a->sinks[kv * (a->heads / a->kv_heads) + row / part->n] : -INFINITY;
    all->total = a->sinks ? 1 : 0;
    memset(all->out, 0, a->ve * sizeof(float));
}

static void end_row(const struct attention *a, const struct part *part, long kv, long row, const struct gathered *all) {
    long head = kv * (a->heads / a->kv_heads) + row / part->n;
    float *out = a->out + ((part->token + row % part->n) * a->heads + head) * a->ve;
    for (long c = 0; c < a->ve; c += LANES) store(out + c, load(all->out + c) / all->total);
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
    struct attention a = {plan, query, sinks, keys, values, head_stride, token_stride, key_stride, value_stride, out, heads, kv_heads,
                          e, ve, window, scaling, softcap};
    long group = heads / kv_heads, most = 0, stretches = 0, count = plan->count; /* most: rows of a part's key head */
    for (long p = 0; p < count; p++) {
        const struct part *part = plan->parts + p;
        if (new_key) append(keys, key_stride, new_key, new_key_head, new_key_token, kv_heads, part, e);
        if (new_value) append(values, value_stride, new_value, new_value_head, new_value_token, kv_heads, part, ve);
        most = max(most, group * part->n);
        stretches = max(stretches, stretches_of(&a, part).to);
    }
    /* A task is a block of rows with all stretches; or one of its stretches, where there are few blocks for the threads. */
    long blocks = (most + LANES - 1) / LANES, tasks = count * kv_heads * blocks;
    long size = (sizeof(struct gathered) / sizeof(float) + ve + LANES - 1) / LANES * LANES;
    int apart = stretches > 1 && threads > 1 && tasks < 8 * threads;
    long steps = apart ? stretches : 1;
    float *kept = apart ? aligned_alloc(sizeof(vec), tasks * stretches * LANES * size * sizeof(float)) : NULL;
#pragma omp parallel num_threads(threads) if (tasks * steps > 1)
    {
        vec *transposed = aligned_alloc(sizeof(vec), e * sizeof(vec) + 2 * LANES * size * sizeof(float));
        float *one = (float *)(transposed + e), *all = one + LANES * size; /* of a block's rows: a stretch, and all before it */
#pragma omp for schedule(dynamic)
        for (long task = 0; task < tasks * steps; task++) {
            long block = task / steps, begin = block % blocks * LANES, kv = block / blocks % kv_heads;
            const struct part *part = plan->parts + block / blocks / kv_heads;
            int rows = (int)min(group * part->n - begin, LANES);
            struct stretches own = stretches_of(&a, part);
            if (rows <= 0 || (apart && (task % steps < own.from || task % steps >= own.to))) continue;
            struct gathered *results[LANES];
            for (int r = 0; r < rows; r++) results[r] = (void *)((apart ? kept + task * LANES * size : one) + r * size);
            transpose_queries(&a, part, kv, begin, rows, transposed);
            if (apart) {
                attend_stretch(&a, part, kv, task % steps, begin, rows, transposed, results);
                continue;
            }
            for (int r = 0; r < rows; r++) begin_row(&a, part, kv, begin + r, (void *)(all + r * size));
            for (long i = own.from; i < own.to; i++) {
                attend_stretch(&a, part, kv, i, begin, rows, transposed, results);
                for (int r = 0; r < rows; r++) merge((void *)(all + r * size), results[r], ve);
            }
            for (int r = 0; r < rows; r++) end_row(&a, part, kv, begin + r, (void *)(all + r * size));
        }
#pragma omp for
        for (long row = 0; row < (apart ? tasks * LANES : 0); row++) {
            long block = row / LANES, at = block % blocks * LANES + row % LANES, kv = block / blocks % kv_heads;
            const struct part *part = plan->parts + block / blocks / kv_heads;
            if (at >= group * part->n) continue;
            struct stretches own = stretches_of(&a, part);
            begin_row(&a, part, kv, at, (void *)all);
            for (long i = own.from; i < own.to; i++)
                merge((void *)all, (void *)(kept + ((block * stretches + i) * LANES + row % LANES) * size), ve);
            end_row(&a, part, kv, at, (void *)all);
        }
        free(transposed);
    }
    free(kept);
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

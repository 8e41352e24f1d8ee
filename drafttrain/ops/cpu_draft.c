/* Drafting: a head whose top tokens cost a fraction of its exact products, one depth of a drafter of decoder layers for tokens of
 * several sequences, and the growth of token trees by both. This is the file to compile. */
#include "cpu_layers.c"
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* -- top tokens of a head -------------------------------------------------------------------------------------------
 *
 * Drafting needs the likeliest tokens, not all logits. A pass over 4-bit weights scores every token, a shortlist gets exact products.
 * Weights are integers k from 0 to 15: W ~ mean + (k - 7.5) * scale / column, with a scale per row. Factors per column move the error
 * away from columns in which states are large and weights small; the rows' mean shifts all logits alike. Activations have 8
 * bits, sums are integers: they depend neither on other rows nor on threads. */
#define STRIP 64 /* outputs of a panel: [width / 8][outputs][4] bytes; low halves are inputs 0 .. 3 of 8, high halves 4 .. 7 */
#define SHORT 64   /* shortest shortlist, and the vocabulary that is listed whole */
#define WHOLE 512
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define HEAD_ROWS 4
#elif defined(__AVX2__)
#define HEAD_ROWS 2
#else
#define HEAD_ROWS 1
#endif

struct head { /* mirrored in cpu_draft.py */
    const uint8_t *panels;
    const float *scale, *column, *mean, *exact; /* [vocabulary, padded], [width], [width], [vocabulary, width] */
    long vocabulary, width;
    float noise; /* mean square of the weights' errors, in scaled columns */
};

/* Integer products of `rows` states (a constant) with a panel: sums [rows, STRIP]. */
static inline __attribute__((always_inline)) void score(int rows, const int8_t *x, long stride, const uint8_t *panel, long steps,
                                                        int32_t *sums) {
#if HEAD_ROWS == 4
    __m512i acc[HEAD_ROWS][STRIP / 16], half = _mm512_set1_epi8(15);
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < STRIP / 16; s++) acc[r][s] = _mm512_setzero_si512();
    for (long i = 0; i < steps; i++, panel += 4 * STRIP)
        for (int s = 0; s < STRIP / 16; s++) {
            __builtin_prefetch(panel + 64 * s + AHEAD);
            __m512i both = _mm512_loadu_si512(panel + 64 * s);
            __m512i low = _mm512_and_si512(both, half), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
            for (int r = 0; r < rows; r++) {
                int32_t four[2];
                memcpy(four, x + r * stride + 8 * i, 8);
                acc[r][s] = _mm512_dpbusd_epi32(acc[r][s], low, _mm512_set1_epi32(four[0]));
                acc[r][s] = _mm512_dpbusd_epi32(acc[r][s], high, _mm512_set1_epi32(four[1]));
            }
        }
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < STRIP / 16; s++) _mm512_storeu_si512(sums + r * STRIP + 16 * s, acc[r][s]);
#elif defined(__AVX2__)
    __m256i acc[HEAD_ROWS][STRIP / 8], half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < STRIP / 8; s++) acc[r][s] = _mm256_setzero_si256();
    for (long i = 0; i < steps; i++, panel += 4 * STRIP)
        for (int s = 0; s < STRIP / 8; s++) {
            __builtin_prefetch(panel + 32 * s + AHEAD);
            __m256i both = _mm256_loadu_si256((const void *)(panel + 32 * s));
            __m256i low = _mm256_and_si256(both, half), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), half);
            for (int r = 0; r < rows; r++) { /* four products of at most 15 * 127 fit in 16 bits */
                int32_t four[2];
                memcpy(four, x + r * stride + 8 * i, 8);
                __m256i first = _mm256_maddubs_epi16(low, _mm256_set1_epi32(four[0]));
                __m256i second = _mm256_maddubs_epi16(high, _mm256_set1_epi32(four[1]));
                acc[r][s] = _mm256_add_epi32(acc[r][s], _mm256_madd_epi16(_mm256_add_epi16(first, second), ones));
            }
        }
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < STRIP / 8; s++) _mm256_storeu_si256((void *)(sums + r * STRIP + 8 * s), acc[r][s]);
#else
    memset(sums, 0, STRIP * sizeof *sums);
    for (long i = 0; i < steps; i++, panel += 4 * STRIP, x += 8)
        for (int o = 0; o < STRIP; o++)
            for (int j = 0; j < 4; j++) sums[o] += (panel[4 * o + j] & 15) * x[j] + (panel[4 * o + j] >> 4) * x[4 + j];
#endif
}

/* What turns a state's integer sums into scores: (sum - offset) * factor * scale + base. noise: variance of a score's error. */
struct rounded { float factor, offset, base, noise; };

/* State x [width] -> integers q [8 steps] from -127 to 127. */
static struct rounded round_state(const struct head *head, const float *x, int8_t *q, long padded) {
    float most = 1e-30f, square = 0, base = 0;
    long sum = 0;
    for (long i = 0; i < head->width; i++) {
        float scaled = x[i] * head->column[i];
        most = fmaxf(most, fabsf(scaled));
        square += scaled * scaled;
        base += x[i] * head->mean[i];
    }
    for (long i = 0; i < head->width; i++) sum += q[i] = (int8_t)lrintf(x[i] * head->column[i] * (127 / most));
    memset(q + head->width, 0, padded - head->width);
    return (struct rounded){most / 127, 7.5f * sum, base, square * head->noise};
}

static float product(const float *a, const float *b, long n) {
    vec sums[2] = {{0}};
    long i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        sums[0] += load(a + i) * load(b + i);
        sums[1] += load(a + i + LANES) * load(b + i + LANES);
    }
    float total = 0;
    for (; i < n; i++) total += a[i] * b[i];
    sums[0] += sums[1];
    for (int l = 0; l < LANES; l++) total += sums[0][l];
    return total;
}

struct scored { float score; int id; };

/* The `most` highest of z [d], at least as many as exist, in any order: a heap whose top is the lowest. */
static long shortlist(const float *z, long d, long most, struct scored *heap) {
    long held = 0;
    for (long i = 0; i < d;) {
        if (held == most && i + SPAN <= d && !any_above(z + i, heap[0].score)) { /* most spans */
            i += SPAN;
            continue;
        }
        for (long end = min(d, i + SPAN), at, child; i < end; i++) {
            struct scored new = {z[i], (int)i};
            if (held < most) {
                for (at = held++; at && heap[(at - 1) / 2].score > new.score; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
            } else {
                if (!(new.score > heap[0].score)) continue;
                for (at = 0; (child = 2 * at + 1) < held; at = child) {
                    child += child + 1 < held && heap[child + 1].score < heap[child].score;
                    if (!(heap[child].score < new.score)) break;
                    heap[at] = heap[child];
                }
            }
            heap[at] = new;
        }
    }
    return held;
}

/* The top k of one state by its scores z: ids and log-probabilities, descending, equal ones by id; returns the log-sum-exp. */
static float choose_top(const struct head *head, const float *x, const float *z, float noise, long k, int64_t *ids, float *top,
                        struct scored *list, long most) {
    long d = head->vocabulary, width = head->width, held = shortlist(z, d, most, list), i;
    float highest = list[0].score, all = 0, listed = 0, exact = 0;
    for (i = 0; i < held; i++) highest = fmaxf(highest, list[i].score);
    vec total = {0};
    for (i = 0; i + LANES <= d; i += LANES) total += exponential(load(z + i) - highest);
    for (; i < d; i++) all += expf(z[i] - highest);
    for (int l = 0; l < LANES; l++) all += total[l];
    for (i = 0; i < min(4, held); i++) fetch((const char *)(head->exact + list[i].id * width), width * sizeof(float));
    for (long found = i = 0; i < held; i++) {
        if (i + 4 < held) fetch((const char *)(head->exact + list[i + 4].id * width), width * sizeof(float));
        float value = product(x, head->exact + list[i].id * width, width);
        listed += expf(list[i].score - highest);
        exact += expf(value - highest);
        long place = found < k ? found++ : k;
        for (; place && (value > top[place - 1] || (value == top[place - 1] && list[i].id < ids[place - 1])); place--)
            if (place < k) top[place] = top[place - 1], ids[place] = ids[place - 1];
        if (place < k) top[place] = value, ids[place] = list[i].id;
    }
    /* Errors of the scores raise the mean of their exponentials. */
    float sum = highest + logf(exact + fmaxf(0, all - listed) * expf(-0.5f * noise));
    for (i = 0; i < k; i++) top[i] -= sum;
    return sum;
}

/* Top-k of each of `rows` states x [rows, width]: ids and log-probabilities [rows, k], descending, and log_sum [rows] of the logits.
 * k is at most the vocabulary. A state's result does not depend on the others. */
void head_top(const struct head *head, const float *x, long rows, long k, int64_t *ids, float *top, float *log_sum, int threads) {
    long d = head->vocabulary, panels = (d + STRIP - 1) / STRIP, steps = (head->width + 7) / 8, most = d <= WHOLE ? d : min(d, max(SHORT, 4 * k));
    float *z = malloc(rows * panels * STRIP * sizeof(float));
    int8_t *q = malloc(rows * steps * 8);
    struct scored *lists = malloc(rows * most * sizeof *lists);
    struct rounded *how = malloc(rows * sizeof *how);
    for (long r = 0; r < rows; r++) how[r] = round_state(head, x + r * head->width, q + r * steps * 8, steps * 8);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (long p = 0; p < panels; p++)
            for (long done = 0, m; done < rows; done += m) {
                int32_t sums[HEAD_ROWS * STRIP];
                const uint8_t *panel = head->panels + p * steps * 4 * STRIP;
                const int8_t *from = q + done * steps * 8;
                m = min(HEAD_ROWS, rows - done);
                switch (m) {
                case 1: score(1, from, steps * 8, panel, steps, sums); break;
#if HEAD_ROWS > 1
                case 2: score(2, from, steps * 8, panel, steps, sums); break;
#endif
#if HEAD_ROWS > 2
                case 3: score(3, from, steps * 8, panel, steps, sums); break;
                case 4: score(4, from, steps * 8, panel, steps, sums); break;
#endif
                }
                for (long r = 0; r < m; r++) {
                    struct rounded to = how[done + r];
                    float *row = z + (done + r) * panels * STRIP + p * STRIP;
                    for (int o = 0; o < STRIP; o++)
                        row[o] = (sums[r * STRIP + o] - to.offset) * to.factor * head->scale[p * STRIP + o] + to.base;
                }
            }
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++)
            log_sum[r] = choose_top(head, x + r * head->width, z + r * panels * STRIP, how[r].noise, k, ids + r * k, top + r * k,
                                    lists + r * most, most);
    }
    free(z), free(q), free(lists), free(how);
}

#define OPENED 64 /* bits of `ancestors`: most tokens of a sequence that see each other */

/* -- one depth ------------------------------------------------------------------------------------------------------ */

/* A drafter of decoder layers. NULL: not there. Mirrored in cpu_draft.py. */
struct draft {
    const struct layer *const *layers;
    const void *project, *fuse; /* panels: embedding and state, joined, to a state; target features to a state */
    const float *embed_norm, *state_norm, *norm; /* of what is read, and of the last layer's output */
    const float *project_bias;
    int project_format, fuse_format, count, embed_width, hidden, returns_normed, residual_normed, features; /* features: columns that fuse reads */
    float eps;
};

/* One depth for n tokens: embeds [n, embed_width] and states [n, hidden] -> out [n, hidden], which the next depth reads, and read
 * [n, hidden], the head's input. Without `project` the first layer reads embedding and state joined. cosine, sine [positions,
 * rotary_dim]; caches: the buffers of each layer, per part of the plan. */
void draft_step(const struct draft *d, const float *embeds, const float *states, long n, const float *cosine, const float *sine,
                const struct buffers *const *caches, const struct plan *plan, long window, float *out, float *read, int threads) {
    long e = d->layers[0]->head_dim, heads = d->layers[0]->heads, kv_heads = d->layers[0]->kv_heads;
    long rotated = d->layers[0]->rotary_dim, hidden = d->hidden, joined = d->embed_width + hidden;
    long width = (heads + 2 * kv_heads) * e;
    float *input = malloc(n * (joined + 2 * rotated + width + heads * e) * sizeof(float)), *cosines = input + n * joined;
    float *sines = cosines + n * rotated, *qkv = sines + n * rotated, *attended = qkv + n * width;
    for (long r = 0; r < n; r++) {
        float *row = input + r * joined, *state = row + d->embed_width;
        memcpy(row, embeds + r * d->embed_width, d->embed_width * sizeof(float));
        memcpy(state, states + r * hidden, hidden * sizeof(float));
        if (d->embed_norm) rms_norm(row, d->embed_norm, d->eps, row, 1, d->embed_width);
        if (d->state_norm) rms_norm(state, d->state_norm, d->eps, state, 1, hidden);
        if (!d->project) memcpy(out + r * hidden, d->residual_normed ? state : states + r * hidden, hidden * sizeof(float));
    }
    if (d->project) skinny_linear(input, n, joined, d->project, d->project_format, out, hidden, threads);
    for (long r = 0; d->project_bias && r < n; r++)
        for (long i = 0; i < hidden; i++) out[r * hidden + i] += d->project_bias[i];
    place(plan, cosine, sine, rotated, cosines, sines);
    for (int i = 0; i < d->count; i++) {
        float *key = qkv + heads * e, *value = key + kv_heads * e;
        layer_before_attention(d->layers[i], i || d->project ? out : input, n, cosines, sines, qkv, threads);
        for (long p = 0; p < plan->count; p++) {
            struct plan own = {plan->parts + p, 1, plan->ancestors, plan->depth};
            const struct buffers *b = caches[p] + i;
            tree_attention(qkv, e, width, key, e, width, value, e, width, b->keys, b->key_stride, b->values, b->value_stride, b->half,
                           attended, heads, kv_heads, e, e, &own, 1 / sqrtf(e), window, 0, NULL, threads);
        }
        layer_after_attention(d->layers[i], out, attended, n, threads);
    }
    if (d->norm) rms_norm(out, d->norm, d->eps, read, n, hidden);
    else memcpy(read, out, n * hidden * sizeof(float));
    if (d->returns_normed) memcpy(out, read, n * hidden * sizeof(float));
    free(input);
}

/* The depth 0 of committed tokens: what sequences read between two trees. tokens [n] target ids and features [n, features] of all
 * sequences, a part of the plan each. table [., embed_width]: the target's embedding. states and reads [parts, hidden]: `out` and
 * `read` of each sequence's last token. */
void draft_read(const struct draft *d, const int64_t *tokens, const float *features, long n, const float *table, const float *cosine,
                const float *sine, const struct buffers *const *caches, const struct plan *plan, long window, float *states, float *reads,
                int threads) {
    long hidden = d->hidden;
    float *fused = malloc(n * (3 * hidden + d->embed_width) * sizeof(float)), *out = fused + n * hidden, *read = out + n * hidden;
    float *embeds = read + n * hidden;
    for (long r = 0; r < n; r++)
        memcpy(embeds + r * d->embed_width, table + tokens[r] * d->embed_width, d->embed_width * sizeof(float));
    if (d->fuse) skinny_linear(features, n, d->features, d->fuse, d->fuse_format, fused, hidden, threads);
    draft_step(d, embeds, d->fuse ? fused : features, n, cosine, sine, caches, plan, window, out, read, threads);
    for (long s = 0; s < plan->count; s++) {
        long last = plan->parts[s].token + plan->parts[s].n - 1;
        memcpy(states + s * hidden, out + last * hidden, hidden * sizeof(float));
        memcpy(reads + s * hidden, read + last * hidden, hidden * sizeof(float));
    }
    free(fused);
}

/* Stores keys and values of states [n, hidden] in every layer, as a block drafter's context: no queries, no norm before. The query
 * rows of a layer's first panels must be whole panels. */
void draft_context(const struct draft *d, const float *states, long n, const float *cosine, const float *sine,
                   const struct buffers *const *caches, const struct plan *plan, int threads) {
    long e = d->layers[0]->head_dim, kv_heads = d->layers[0]->kv_heads, rotated = d->layers[0]->rotary_dim, width = 2 * kv_heads * e;
    float *cosines = malloc(n * (2 * rotated + width) * sizeof(float)), *sines = cosines + n * rotated, *kv = sines + n * rotated;
    place(plan, cosine, sine, rotated, cosines, sines);
    for (int i = 0; i < d->count; i++) {
        const struct layer *layer = d->layers[i];
        long skipped = layer->heads * e / PANEL * panel_size(d->hidden, layer->qkv_format);
        skinny_linear(states, n, d->hidden, (const char *)layer->qkv + skipped, layer->qkv_format, kv, width, threads);
        for (long r = 0; r < n; r++) {
            float *key = kv + r * width;
            if (layer->key_norm) rms_norm(key, layer->key_norm, layer->eps, key, kv_heads, e);
            for (long head = 0; head < kv_heads; head++)
                rotate(key + head * e, cosines + r * rotated, sines + r * rotated, (int)rotated);
        }
        for (long p = 0; p < plan->count; p++) {
            const struct buffers *b = caches[p] + i;
            append(b->keys, (int)b->half, b->key_stride, kv, e, width, kv_heads, plan->parts + p, e);
            append(b->values, (int)b->half, b->value_stride, kv + kv_heads * e, e, width, kv_heads, plan->parts + p, e);
        }
    }
    free(cosines);
}

/* -- trees ----------------------------------------------------------------------------------------------------------
 *
 * Growth of greedy trees as `GrowingTree` in drafters/common/tree_growth.py defines it, without a call per depth. */
struct shape { long depth, width, budget, dynamic; double floor; const long *fanout; }; /* mirrored in cpu_draft.py */

struct tree {
    const struct shape *shape;
    int64_t *tokens;          /* drafter ids of all candidates, with their parents, log-probabilities, orders of opening */
    int *parents, *order;
    double *scores, *sorted;
    uint64_t ancestors[OPENED]; /* of the root and the opened nodes */
    long depth[OPENED];
    int row[OPENED], level[OPENED], size; /* row: of a token's state in the last step; level: nodes to open next */
    long count, opened, done;
};

static int falling(const void *a, const void *b) { return (*(const double *)a < *(const double *)b) - (*(const double *)a > *(const double *)b); }

/* The `most`-th highest of n numbers. */
static double nth(const double *values, long n, long most, double *sorted) {
    memcpy(sorted, values, n * sizeof(double));
    qsort(sorted, n, sizeof(double), falling);
    return sorted[most - 1];
}

/* Of ascending nodes those of the `most` highest scores, in place; of equal ones the first. */
static long best(const double *scores, int *nodes, long n, long most, double *sorted) {
    if (n <= most) return n;
    for (long i = 0; i < n; i++) sorted[n + i] = scores[nodes[i]];
    double bar = nth(sorted + n, n, most, sorted);
    long above = 0, kept = 0;
    for (long i = 0; i < n; i++) above += scores[nodes[i]] > bar;
    for (long i = 0, equal = most - above; i < n; i++)
        if (scores[nodes[i]] > bar || (scores[nodes[i]] == bar && equal-- > 0)) nodes[kept++] = nodes[i];
    return kept;
}

/* Adds the children of the nodes opened last, by the top tokens ids and log_probs [size, k], and chooses the nodes to open next;
 * scratch: room for all candidates. */
static void grow(struct tree *t, long depth, const int64_t *ids, const float *log_probs, long k, int *scratch) {
    const struct shape *shape = t->shape;
    long first = t->count, wide = min(k, shape->dynamic ? shape->width : shape->fanout[depth]), n = 0;
    for (int i = 0; i < t->size; i++)
        for (long j = 0; j < wide; j++, t->count++) {
            int parent = t->level[i];
            t->tokens[t->count] = ids[i * k + j];
            t->parents[t->count] = parent;
            t->scores[t->count] = (parent < 0 ? 0 : t->scores[parent]) + log_probs[i * k + j];
            t->order[t->count] = -1;
        }
    t->done = depth + 1 == shape->depth;
    if (t->done) return;
    for (long node = first; node < t->count; node++)
        if (t->scores[node] >= shape->floor) scratch[n++] = (int)node;
    if (shape->dynamic) {
        n = best(t->scores, scratch, n, shape->width, t->sorted);
        if (t->count >= shape->budget) { /* nodes that score above the budget-th candidate */
            double bar = nth(t->scores, t->count, shape->budget, t->sorted);
            long kept = 0;
            for (long i = 0; i < n; i++)
                if (t->scores[scratch[i]] > bar) scratch[kept++] = scratch[i];
            n = kept;
        }
    }
    t->done = n == 0;
    t->size = (int)n;
    for (long i = 0; i < n; i++) {
        int node = t->level[i] = scratch[i], above = t->parents[node] < 0 ? 0 : 1 + t->order[t->parents[node]];
        long own = 1 + t->opened;
        t->order[node] = (int)t->opened++;
        t->ancestors[own] = t->ancestors[above] | (uint64_t)1 << own;
        t->depth[own] = t->depth[above] + 1;
    }
}

/* The likeliest nodes of a grown tree: target ids, parents and log-probabilities [budget]; returns their number. */
static long finish(struct tree *t, const int64_t *kept_ids, int64_t *tokens, int64_t *parents, float *scores, int *scratch) {
    for (int i = 0; i < t->count; i++) scratch[i] = i;
    long n = best(t->scores, scratch, t->count, t->shape->budget, t->sorted);
    for (int i = 0; i < n; i++) {
        int node = scratch[i], parent = t->parents[node];
        t->order[node] = i;
        tokens[i] = kept_ids[t->tokens[node]];
        parents[i] = parent < 0 ? -1 : t->order[parent];
        scores[i] = (float)t->scores[node];
    }
    return n;
}

/* Trees of several sequences, a step per depth for the nodes that any of them opens. roots: a part per sequence, whose only new
 * token is the root, which is stored already: the last committed one.
 *
 * shape: of all trees; at most OPENED - 1 nodes are opened, and `room` candidates made. table: the target's embedding [.,
 * embed_width]. states, reads [sequences, hidden]: what the roots' children read, and the head's input at the roots. tokens, parents
 * and scores [sequences, budget]; sizes [sequences]: how many of each. */
void draft_trees(const struct draft *d, const struct head *head, const struct shape *shape, long room, const float *table,
                 const int64_t *kept_ids, const float *cosine, const float *sine, const struct buffers *const *caches,
                 const struct plan *roots, long window, const float *states, const float *reads, int64_t *tokens, int64_t *parents,
                 float *scores, int64_t *sizes, int threads) {
    long count = roots->count, hidden = d->hidden, k = min(shape->width, head->vocabulary), most = count * OPENED;
    struct tree *trees = calloc(count, sizeof *trees);
    int64_t *ids = malloc((most * k + count * room) * sizeof *ids), *candidates = ids + most * k;
    float *log_probs = malloc((most * (k + 1 + d->embed_width + 3 * hidden)) * sizeof(float)), *sums = log_probs + most * k;
    float *embeds = sums + most, *above = embeds + most * d->embed_width, *out = above + most * hidden, *read = out + most * hidden;
    double *numbers = malloc(3 * count * room * sizeof *numbers);
    int *indices = malloc((2 * count + 1) * room * sizeof *indices), *scratch = indices + 2 * count * room;
    struct part *parts = malloc(count * sizeof *parts);
    const struct buffers **own = malloc(count * sizeof *own);
    uint64_t *ancestors = malloc(most * sizeof *ancestors);
    long *depths = malloc(most * sizeof *depths);
    head_top(head, reads, count, k, ids, log_probs, sums, threads);
    for (long s = 0; s < count; s++) {
        struct tree *t = trees + s;
        *t = (struct tree){.shape = shape, .tokens = candidates + s * room, .parents = indices + 2 * s * room};
        t->order = t->parents + room, t->scores = numbers + 3 * s * room, t->sorted = t->scores + room;
        t->ancestors[0] = t->size = 1, t->level[0] = -1, t->row[0] = (int)s;
        grow(t, 0, ids + s * k, log_probs + s * k, k, scratch);
    }
    for (long depth = 1, n;; depth++) {
        struct plan plan = {parts, 0, ancestors, depths};
        n = 0;
        for (long s = 0, node = 0; s < count; s++) {
            struct tree *t = trees + s;
            if (t->done) continue;
            long held = 1 + t->opened - t->size;
            const struct part *root = roots->parts + s;
            parts[plan.count] = (struct part){root->slot, root->prefix, n, t->size, held, node, root->base};
            own[plan.count++] = caches[s];
            memcpy(ancestors + node, t->ancestors, (1 + t->opened) * sizeof *ancestors);
            memcpy(depths + node, t->depth, (1 + t->opened) * sizeof *depths);
            for (int i = 0; i < t->size; i++, n++) {
                int parent = t->parents[t->level[i]], from = t->row[parent < 0 ? 0 : 1 + t->order[parent]];
                memcpy(embeds + n * d->embed_width, table + kept_ids[t->tokens[t->level[i]]] * d->embed_width, d->embed_width * sizeof(float));
                memcpy(above + n * hidden, (depth == 1 ? states : out) + from * hidden, hidden * sizeof(float));
                t->row[held + i] = (int)n;
            }
            node += 1 + t->opened;
        }
        if (!n) break;
        draft_step(d, embeds, above, n, cosine, sine, own, &plan, window, out, read, threads);
        head_top(head, read, n, k, ids, log_probs, sums, threads);
        for (long s = 0, p = 0; s < count; s++)
            if (!trees[s].done) grow(trees + s, depth, ids + parts[p].token * k, log_probs + parts[p].token * k, k, scratch), p++;
    }
    for (long s = 0; s < count; s++)
        sizes[s] = finish(trees + s, kept_ids, tokens + s * shape->budget, parents + s * shape->budget, scores + s * shape->budget, scratch);
    free(trees), free(ids), free(log_probs), free(numbers), free(indices), free(parts), free(own), free(ancestors), free(depths);
}

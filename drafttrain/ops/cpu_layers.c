/* Attention over a prefix and a token tree, and what is built on it and on the kernels of cpu.c and cpu_linear.c: decoder layers,
 * all layers of a target. cpu_draft.c includes this file. */
#include "cpu.c"

#include "cpu_linear.c"

/* -- tree attention ------------------------------------------------------------------------------------------------- */

/* One sequence of a packed batch. slot: its first one on the cache's slot axis; prefix: committed keys; token: its first new
 * token; n: new tokens; held: tokens of its tree that earlier forwards stored behind the prefix; node: begin of its tree in ancestors
 * and depth; base: position of its first key, whose predecessors a window has dropped. */
struct part { long slot, prefix, token, n, held, node, base; };

/* Where the new tokens of a forward stand: a part per sequence, or several for a long chain, and per token of all trees its ancestors
 * (bit j: token j of its tree, or itself) and its depth. Mirrored in tree_attention.py. */
struct plan {
    const struct part *parts;
    long count;
    const uint64_t *ancestors;
    const long *depth;
};

/* A row is a query head of one new token. What it sees stands in the order of positions: the prefix, then its ancestors, whatever
 * their slots. Positions are cut at multiples of STRETCH; the maximum, the sum and the output of a stretch are computed apart from
 * the others and merged in order. So a row gets the bits that plain decoding gives it, with any number of rows, siblings or threads. */
#define STRETCH 256
#define TILE 32 /* keys whose products are computed at once, a lane per key */
/* Keys and values in bfloat16 are multiplied as such where the processor can (AVX512-BF16): queries and weights are rounded to bfloat16
 * and go in pairs, a pair of numbers of a key or the weights of two positions 2 i and 2 i + 1; sums are float32. Otherwise they are
 * widened. PAIRS, a constant: whether it can. */
#if defined(__AVX512BF16__)
#define PAIRS 1
#else
#define PAIRS 0
#endif
#define MOST_ROWS 48 /* of a task */
typedef uint16_t words __attribute__((vector_size(2 * LANES)));
#ifdef __AVX512F__
#define HIGH 6 /* rows whose sums fit into registers */
#else
#define HIGH 2
#endif

/* What attention computes with, of all parts. Keys and values are float32, or bfloat16 if `half`. */
struct attention {
    const struct plan *plan;
    const float *query, *sinks;
    const char *keys, *values;
    long head_stride, token_stride, key_stride, value_stride; /* of query, keys and values, in numbers */
    float *out;
    long heads, kv_heads, e, ve, window;
    float scaling, softcap;
    int half;
};

/* What a row has gathered: its highest score, the sum of its weights below that, and its weighted values [ve]. */
struct gathered { float highest, total, out[]; };

/* A thread's room for a task. In pairs, a word of two numbers stands where a float stands otherwise. */
struct room {
    float *queries; /* [MOST_ROWS, e], scaled; in pairs [MOST_ROWS, e / 2] */
    float *scores;  /* [MOST_ROWS, STRETCH] by position; then weights, in pairs the first STRETCH / 2 words of a row */
    float *fresh;   /* [MOST_ROWS, 64]: products with the tree's tokens */
    float *tile;    /* [e, TILE] of keys, or [TILE, ve] of values; in pairs half as many words */
    char *nothing;  /* [ve] zeros: the value of a position that a row does not see */
};

static inline long size_of(const struct attention *a) { return a->half ? 2 : 4; }

static inline int in_pairs(const struct attention *a) { return PAIRS && a->half; }

/* sum + a * b, b the same in all lanes; of pairs, sum + the products of both numbers of each word. */
static inline __attribute__((always_inline)) vec add_product(vec sum, vec a, const float *b, int pairs) {
#if PAIRS
    if (pairs) {
        int32_t word;
        memcpy(&word, b, sizeof word);
        return (vec)dot((reg)sum, (reg_words)a, (reg_words)((ints){0} + word));
    }
#endif
    return sum + a * *b;
}

/* LANES numbers of keys or values. */
static inline __attribute__((always_inline)) vec load_numbers(const char *at, int half) {
    if (!half) return load((const float *)at);
    words read;
    memcpy(&read, at, sizeof read);
#ifdef __AVX512F__ /* GCC 12 needs five instructions for what is one */
    return (vec)(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)read), 16));
#else
    return (vec)(__builtin_convertvector(read, ints) << 16);
#endif
}

/* Four keys' next four words, turned: word i of all four in out[i]. */
static inline void turn(const char *const *key, long at, quad *out) {
    quad k[4];
    for (int i = 0; i < 4; i++) memcpy(k + i, key[i] + at, sizeof *k);
    quad low = shuffle(k[0], k[1], 0, 4, 1, 5), high = shuffle(k[0], k[1], 2, 6, 3, 7);
    quad next_low = shuffle(k[2], k[3], 0, 4, 1, 5), next_high = shuffle(k[2], k[3], 2, 6, 3, 7);
    out[0] = shuffle(low, next_low, 0, 1, 4, 5), out[1] = shuffle(low, next_low, 2, 3, 6, 7);
    out[2] = shuffle(high, next_high, 0, 1, 4, 5), out[3] = shuffle(high, next_high, 2, 3, 6, 7);
}

/* TILE keys side by side: tile [e, TILE] in float32, or their words of two numbers [e / 2, TILE]. Meanwhile the next keys come from
 * memory. widened: bfloat16 numbers become float32. */
static inline __attribute__((always_inline)) void lay_side_by_side(const char *const *key, long size, int widened, float *tile) {
    quad turned[4];
    for (int t = 0; t < TILE; t += 4)
        for (long at = 0; at < size; at += 16) {
            if (at % 64 < 16) for (int i = 0; i < 4; i++) __builtin_prefetch(key[t + i] + TILE * size + at);
            turn(key + t, at, turned);
            for (int i = 0; i < 4; i++) {
                float *out = tile + (at / 4 + i) * (widened ? 2 : 1) * TILE + t;
                quad low = turned[i] << 16, high = turned[i] & 0xffff0000;
                memcpy(out, widened ? &low : turned + i, sizeof low);
                if (widened) memcpy(out + TILE, &high, sizeof high);
            }
        }
}

/* Calls FUNCTION(n, ...) with a constant n from 1 to HIGH. */
#define ONE_ROW(FUNCTION, N, ...) case N: FUNCTION(N, __VA_ARGS__); break;
#if HIGH == 6
#define BY_ROWS(FUNCTION, n, ...) switch (n) { ONE_ROW(FUNCTION, 6, __VA_ARGS__) ONE_ROW(FUNCTION, 5, __VA_ARGS__) \
    ONE_ROW(FUNCTION, 4, __VA_ARGS__) ONE_ROW(FUNCTION, 3, __VA_ARGS__) ONE_ROW(FUNCTION, 2, __VA_ARGS__) ONE_ROW(FUNCTION, 1, __VA_ARGS__) }
#else
#define BY_ROWS(FUNCTION, n, ...) switch (n) { ONE_ROW(FUNCTION, 2, __VA_ARGS__) ONE_ROW(FUNCTION, 1, __VA_ARGS__) }
#endif

/* scores [rows, TILE] by `stride` = queries [rows, width] . keys of a tile; `rows` and `pairs` are constants. */
static inline __attribute__((always_inline)) void score_rows(int rows, int pairs, const float *queries, const float *tile, long width,
                                                             float *scores, long stride) {
    vec sum[HIGH][TILE / LANES] = {{{0}}};
    for (long c = 0; c < width; c++, tile += TILE)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < TILE / LANES; j++) sum[i][j] = add_product(sum[i][j], load(tile + j * LANES), queries + i * width + c, pairs);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < TILE / LANES; j++) store(scores + i * stride + j * LANES, sum[i][j]);
}

/* Products of all rows with up to TILE keys. */
static void score_keys(const struct attention *a, const struct room *room, int rows, const char *const *key, float *scores, long stride) {
    long width = in_pairs(a) ? a->e / 2 : a->e;
    if (a->half && !in_pairs(a)) lay_side_by_side(key, 2 * a->e, 1, room->tile);
    else lay_side_by_side(key, 4 * width, 0, room->tile);
    for (int r = 0; r < rows; r += HIGH) {
        const float *queries = room->queries + r * width;
        int high = (int)min(rows - r, HIGH);
        if (in_pairs(a)) BY_ROWS(score_rows, high, 1, queries, room->tile, width, scores + r * stride, stride)
        else BY_ROWS(score_rows, high, 0, queries, room->tile, width, scores + r * stride, stride)
    }
}

/* out[i][c ..] += sum over t of weights[i][t] * value[t], of rows i; `rows`, `wide` vectors and `pairs` are constants. */
static inline __attribute__((always_inline)) void weigh(int rows, int wide, int pairs, const float *weights, const float *value, long count,
                                                        long ve, struct gathered *const *out, long c) {
    vec sum[HIGH][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < wide; j++) sum[i][j] = load(out[i]->out + c + j * LANES);
    for (long t = 0; t < count; t++, value += ve)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < wide; j++) sum[i][j] = add_product(sum[i][j], load(value + j * LANES), weights + i * STRETCH + t, pairs);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < wide; j++) store(out[i]->out + c + j * LANES, sum[i][j]);
}

static inline __attribute__((always_inline)) void weigh_rows(int rows, int pairs, const float *weights, const float *value, long count,
                                                             long ve, struct gathered *const *out) {
    long c = 0;
    for (; c + 4 * LANES <= ve; c += 4 * LANES) weigh(rows, 4, pairs, weights, value + c, count, ve, out, c);
    for (; c < ve; c += LANES) weigh(rows, 1, pairs, weights, value + c, count, ve, out, c);
}

/* The values of two positions in words: number c of the first and of the second. */
static inline vec pair_up(const char *first, const char *second) {
    words a, b;
    memcpy(&a, first, sizeof a);
    memcpy(&b, second, sizeof b);
#ifdef __AVX512F__
    return (vec)_mm512_or_si512(_mm512_cvtepu16_epi32((__m256i)a), _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)b), 16));
#else
    return (vec)(__builtin_convertvector(a, ints) | __builtin_convertvector(b, ints) << 16);
#endif
}

/* Adds up to TILE values, in pairs an even number, to the outputs of all rows. */
static void weigh_values(const struct attention *a, const struct room *room, int rows, const float *weights, const char *value, long count,
                         struct gathered *const *out) {
    long ve = a->ve, size = ve * size_of(a);
    const float *numbers = a->half ? room->tile : (const float *)value;
    for (long c = 0; c < count * size; c += 64) __builtin_prefetch(value + TILE * size + c);
    if (in_pairs(a)) {
        count /= 2;
        for (long t = 0; t < count; t++, value += 2 * size)
            for (long c = 0; c < ve; c += LANES) store(room->tile + t * ve + c, pair_up(value + 2 * c, value + size + 2 * c));
    } else if (a->half)
        for (long c = 0; c < count * ve; c += LANES) store(room->tile + c, load_numbers(value + 2 * c, 1));
    for (int r = 0; r < rows; r += HIGH) {
        int high = (int)min(rows - r, HIGH);
        if (in_pairs(a)) BY_ROWS(weigh_rows, high, 1, weights + r * STRETCH, numbers, count, ve, out + r)
        else BY_ROWS(weigh_rows, high, 0, weights + r * STRETCH, numbers, count, ve, out + r)
    }
}

/* Adds the values of one or two tokens, a pair, to a row's output. */
static void weigh_tokens(const struct attention *a, const char *value, const char *second, const float *weight, float *out) {
    for (long c = 0; c < a->ve; c += LANES) {
        const char *at = value + c * size_of(a);
        vec numbers = in_pairs(a) ? pair_up(at, second + c * size_of(a)) : load_numbers(at, a->half);
        store(out + c, add_product(load(out + c), numbers, weight, in_pairs(a)));
    }
}

/* The stretches [from, to) in which a part's rows see anything. */
struct stretches { long from, to; };

static struct stretches stretches_of(const struct attention *a, const struct part *part) {
    long first = a->window ? max(0, part->prefix + 1 - a->window) : 0, end = part->prefix + part->held + part->n;
    return (struct stretches){first / STRETCH, (end + STRETCH - 1) / STRETCH};
}

/* The scaled queries of rows (row = query head of the group, new token) from `begin` on. */
static void scale_queries(const struct attention *a, const struct part *part, long kv, long begin, int rows, float *queries) {
    for (int r = 0; r < rows; r++, queries += in_pairs(a) ? a->e / 2 : a->e) {
        long head = kv * (a->heads / a->kv_heads) + (begin + r) / part->n, fresh = (begin + r) % part->n;
        const float *query = a->query + head * a->head_stride + (part->token + fresh) * a->token_stride;
        for (long c = 0; c < a->e; c++) {
            float scaled = query[c] * a->scaling;
            if (in_pairs(a)) ((uint16_t *)queries)[c] = (uint16_t)bfloat16(scaled);
            else queries[c] = scaled;
        }
    }
}

/* Stores weights at position t of a row's scores; returns them, in pairs as they were rounded. */
static inline vec store_weights(float *scores, long t, vec weights, int pairs) {
#if PAIRS
    if (pairs) {
        __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)weights);
        memcpy((uint16_t *)scores + t, &rounded, sizeof rounded);
        return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
    }
#endif
    store(scores + t, weights);
    return weights;
}

/* Scores [first, end), whole vectors, become weights e^(score - highest). */
static void soften(const struct attention *a, float *scores, long first, long end, struct gathered *gathered) {
    vec nothing = (vec){0} - INFINITY, highest = nothing, total = {0};
    float most[LANES], sum[LANES];
    for (long t = first; a->softcap > 0 && t < end; t += LANES) {
        vec s = load(scores + t), capped = a->softcap - 2 * a->softcap / (exponential(s * (2 / a->softcap)) + 1);
        store(scores + t, choose(s == nothing, s, capped));
    }
    for (long t = first; t < end; t += LANES) highest = larger(load(scores + t), highest);
    store(most, highest);
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) most[l] = most[l] > most[l + width] ? most[l] : most[l + width];
    float below = most[0] == -INFINITY ? 0 : most[0]; /* a row may see nothing here */
    for (long t = first; t < end; t += LANES) {
        vec weight = exponential(load(scores + t) - below);
        total += store_weights(scores, t, weight, in_pairs(a));
    }
    store(sum, total);
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) sum[l] += sum[l + width];
    gathered->highest = most[0], gathered->total = sum[0];
}

/* One part, key head and stretch of positions, for the rows of `scale_queries`. Every key and value of the prefix is read once. */
static void attend_stretch(const struct attention *a, const struct part *part, long kv, long stretch, long begin, int rows,
                           const struct room *room, struct gathered *const *gathered) {
    const uint64_t *ancestors = a->plan->ancestors + part->node;
    const long *depth = a->plan->depth + part->node;
    long prefix = part->prefix, base = stretch * STRETCH, key_size = a->e * size_of(a), value_size = a->ve * size_of(a);
    const char *key = a->keys + kv * a->key_stride * size_of(a) + part->slot * key_size;
    const char *value = a->values + kv * a->value_stride * size_of(a) + part->slot * value_size;
    /* Keys of the prefix: [from, to) in the stretch; with a window from the first that any row sees. */
    long least = a->window ? max(0, prefix + 1 - a->window) : 0;
    long from = min(max(least - base, 0), STRETCH), to = max(min(prefix - base, STRETCH), from), end = to;
    long oldest[MOST_ROWS]; /* of each row: the first place in the stretch that its window holds */
    uint64_t seen[MOST_ROWS] = {0}, any = 0; /* the tree's tokens that a row sees in this stretch */
    const char *k[TILE];

    for (int r = 0; r < rows; r++) {
        long fresh = (begin + r) % part->n, place = prefix + depth[part->held + fresh];
        oldest[r] = a->window ? min(max(place + 1 - a->window - base, 0), STRETCH) : 0;
        uint64_t rest = prefix - base < STRETCH ? ancestors[part->held + fresh] : 0;
        for (; rest; rest &= rest - 1) {
            int j = __builtin_ctzll(rest);
            long t = prefix + depth[j] - base;
            if (t < oldest[r] || t < 0 || t >= STRETCH) continue;
            seen[r] |= 1ull << j;
            end = max(end, t + 1);
        }
        any |= seen[r];
    }
    long first = from / TILE * TILE, last = (end + LANES - 1) / LANES * LANES;
    for (long t = first; t < to; t += TILE) {
        for (int j = 0; j < TILE; j++) k[j] = key + (base + min(t + j, to - 1)) * key_size;
        score_keys(a, room, rows, k, room->scores + t, STRETCH);
    }
    for (long i = 0; i < 64 && any >> i; i += TILE) {
        for (int j = 0; j < TILE; j++) k[j] = key + (prefix + min(i + j, part->held + part->n - 1)) * key_size;
        score_keys(a, room, rows, k, room->fresh + i, 64);
    }
    for (int r = 0; r < rows; r++) {
        float *scores = room->scores + r * STRETCH;
        for (long t = first; t < max(from, min(oldest[r], to)); t++) scores[t] = -INFINITY;
        for (long t = to; t < last; t++) scores[t] = -INFINITY;
        for (uint64_t rest = seen[r]; rest; rest &= rest - 1) {
            int j = __builtin_ctzll(rest);
            scores[prefix + depth[j] - base] = room->fresh[r * 64 + j];
        }
        soften(a, scores, first, last, gathered[r]);
    }
    for (int r = 0; r < rows; r++) memset(gathered[r]->out, 0, a->ve * sizeof(float));
    long step = in_pairs(a) ? 2 : 1, whole = to / step * step; /* the prefix in whole pairs */
    for (long t = from / step * step; t < whole; t += TILE)
        weigh_values(a, room, rows, room->scores + t / step, value + (base + t) * value_size, min(whole - t, TILE), gathered);
    for (int r = 0; r < rows; r++) {
        const char *rest[64 + 2]; /* the values of the positions from `whole` on that the row sees */
        for (int i = 0; i < 64 + 2; i++) rest[i] = room->nothing;
        if (whole < to) rest[0] = value + (base + whole) * value_size;
        for (uint64_t left = seen[r]; left; left &= left - 1) {
            int j = __builtin_ctzll(left);
            rest[prefix + depth[j] - base - whole] = value + (prefix + j) * value_size;
        }
        for (long i = 0; i < end - whole; i += step)
            if (rest[i] != room->nothing || rest[i + 1] != room->nothing)
                weigh_tokens(a, rest[i], rest[i + 1], room->scores + r * STRETCH + (whole + i) / step, gathered[r]->out);
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

/* Stores a part's new keys or values behind those of its sequence. */
static void append(char *cache, int half, long cache_stride, const float *new, long head_stride, long token_stride, long kv_heads,
                   const struct part *part, long width) {
    for (long kv = 0; kv < kv_heads; kv++)
        for (long i = 0; i < part->n; i++) {
            long at = kv * cache_stride + (part->slot + part->prefix + part->held + i) * width;
            const float *numbers = new + kv * head_stride + (part->token + i) * token_stride;
            if (!half) memcpy(cache + 4 * at, numbers, width * sizeof(float));
            for (long c = 0; half && c < width; c++) ((uint16_t *)cache)[at + c] = (uint16_t)bfloat16(numbers[c]);
        }
}

/* Attention of each part's n new tokens over its committed keys and their own ancestors (a bit per token of the tree, held + n of
 * them, at most 64).
 *
 * query [heads, N, e], new_key [kv_heads, N, e], new_value [kv_heads, N, ve] by strides; new keys and values are stored first
 * (NULL: they are stored already). keys [kv_heads, slots, e], values [kv_heads, slots, ve] with a stride per head, float32 or, if
 * half, bfloat16; out [N, heads, ve]. e and ve are multiples of 16; window 0, softcap 0, sinks NULL: none. */
void tree_attention(const float *query, long head_stride, long token_stride, const float *new_key, long new_key_head,
                    long new_key_token, const float *new_value, long new_value_head, long new_value_token, char *keys,
                    long key_stride, char *values, long value_stride, int half, float *out, long heads, long kv_heads, long e,
                    long ve, const struct plan *plan, float scaling, long window, float softcap, const float *sinks, int threads) {
    struct attention a = {plan, query, sinks, keys, values, head_stride, token_stride, key_stride, value_stride, out, heads, kv_heads,
                          e, ve, window, scaling, softcap, half};
    long group = heads / kv_heads, most = 0, stretches = 0, count = plan->count; /* most: rows of a part's key head */
    for (long p = 0; p < count; p++) {
        const struct part *part = plan->parts + p;
        if (new_key) append(keys, half, key_stride, new_key, new_key_head, new_key_token, kv_heads, part, e);
        if (new_value) append(values, half, value_stride, new_value, new_value_head, new_value_token, kv_heads, part, ve);
        most = max(most, group * part->n);
        stretches = max(stretches, stretches_of(&a, part).to);
    }
    if (!most) return;
    /* A task is a block of rows with all stretches; or one of its stretches, where there are few blocks for the threads. Short
     * prefixes are shared by smaller blocks. */
    long shares = (4 * threads + count * kv_heads * stretches - 1) / (count * kv_heads * stretches);
    long blocks = max((most + MOST_ROWS - 1) / MOST_ROWS, min(shares, most / 8)), high = (most + blocks - 1) / blocks;
    long tasks = count * kv_heads * blocks, size = (sizeof(struct gathered) / sizeof(float) + ve + LANES - 1) / LANES * LANES;
    int apart = stretches > 1 && threads > 1 && tasks < 8 * threads;
    long steps = apart ? stretches : 1;
    float *kept = apart ? aligned_alloc(sizeof(vec), tasks * stretches * high * size * sizeof(float)) : NULL;
#pragma omp parallel num_threads(threads) if (tasks * steps > 1)
    {
        long floats = high * (e + STRETCH + 64 + 2 * size) + max(e, ve) * TILE + ve;
        float *own_room = aligned_alloc(sizeof(vec), (floats + LANES - 1) / LANES * sizeof(vec));
        struct room room = {.tile = own_room, .scores = own_room + max(e, ve) * TILE};
        room.fresh = room.scores + high * STRETCH, room.queries = room.fresh + high * 64;
        float *one = room.queries + high * e, *all = one + high * size; /* of a block's rows: a stretch, and all before it */
        room.nothing = memset(all + high * size, 0, ve * sizeof(float));
#pragma omp for schedule(dynamic)
        for (long task = 0; task < tasks * steps; task++) {
            long block = task / steps, begin = block % blocks * high, kv = block / blocks % kv_heads;
            const struct part *part = plan->parts + block / blocks / kv_heads;
            int rows = (int)min(group * part->n - begin, high);
            struct stretches own = stretches_of(&a, part);
            if (rows <= 0 || (apart && (task % steps < own.from || task % steps >= own.to))) continue;
            struct gathered *results[MOST_ROWS];
            for (int r = 0; r < rows; r++) results[r] = (void *)((apart ? kept + task * high * size : one) + r * size);
            scale_queries(&a, part, kv, begin, rows, room.queries);
            if (apart) {
                attend_stretch(&a, part, kv, task % steps, begin, rows, &room, results);
                continue;
            }
            for (int r = 0; r < rows; r++) begin_row(&a, part, kv, begin + r, (void *)(all + r * size));
            for (long i = own.from; i < own.to; i++) {
                attend_stretch(&a, part, kv, i, begin, rows, &room, results);
                for (int r = 0; r < rows; r++) merge((void *)(all + r * size), results[r], ve);
            }
            for (int r = 0; r < rows; r++) end_row(&a, part, kv, begin + r, (void *)(all + r * size));
        }
#pragma omp for
        for (long row = 0; row < (apart ? tasks * high : 0); row++) {
            long block = row / high, at = block % blocks * high + row % high, kv = block / blocks % kv_heads;
            const struct part *part = plan->parts + block / blocks / kv_heads;
            if (at >= group * part->n) continue;
            struct stretches own = stretches_of(&a, part);
            begin_row(&a, part, kv, at, (void *)all);
            for (long i = own.from; i < own.to; i++)
                merge((void *)all, (void *)(kept + ((block * stretches + i) * high + row % high) * size), ve);
            end_row(&a, part, kv, at, (void *)all);
        }
        free(own_room);
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

/* How a layer attends; table: the rotary table that it reads. Mirrored in target/native_body.py. */
struct form { const float *sinks; long window, table; float scaling, softcap; };

/* A layer's slots in a cache: keys and values [kv_heads, slots, e] with a stride per head, in numbers; bfloat16 if half. */
struct buffers { char *keys, *values; long key_stride, value_stride, half; };

/* read [n, width] -> x [n, hidden], which is added to; scratch [n, (2 heads + 2 kv_heads) head_dim]. */
static void full_layer(const struct layer *layer, const struct form *form, const struct buffers *b, const float *read, float *x,
                       long n, const float *cosine, const float *sine, const struct plan *plan, float *scratch, int threads) {
    long e = layer->head_dim, width = (layer->heads + 2L * layer->kv_heads) * e;
    float *key = scratch + layer->heads * e, *value = key + layer->kv_heads * e, *attended = scratch + n * width;
    layer_before_attention(layer, read, n, cosine, sine, scratch, threads);
    tree_attention(scratch, e, width, key, e, width, value, e, width, b->keys, b->key_stride, b->values, b->value_stride,
                   b->half, attended, layer->heads, layer->kv_heads, e, e, plan, form->scaling, form->window, form->softcap, form->sinks,
                   threads);
    layer_after_attention(layer, x, attended, n, threads);
}

/* Where tokens stand: rows of the rotary tables [positions, rotary_dim], copied per token to cosines and sines. */
static void place(const struct plan *plan, const float *cosine, const float *sine, long rotated, float *cosines, float *sines) {
    for (long p = 0; p < plan->count; p++) {
        const struct part *part = plan->parts + p;
        for (long r = 0; r < part->n; r++) {
            long at = part->base + part->prefix + plan->depth[part->node + part->held + r], to = (part->token + r) * rotated;
            memcpy(cosines + to, cosine + at * rotated, rotated * sizeof(float));
            memcpy(sines + to, sine + at * rotated, rotated * sizeof(float));
        }
    }
}

/* All layers over x [n, hidden], in place. Called layer by layer, a forward of few tokens spends as long in Python as here.
 *
 * tables: cosine and sine [rows, rotary_dim] per rotary table; rows are the tokens, or if `placed` all positions. wanted
 * [features]: ascending layers whose inputs are copied to caught [n, features, hidden]; `count` means the last layer's output.
 * norm [hidden]: also the last norm, to last [n, hidden], and with a head its products, logits [n, vocabulary]; NULL for neither. */
void body_forward(const struct layer *const *layers, const struct form *forms, const struct buffers *buffers, long count, float *x,
                  long n, const float *const *tables, int placed, const struct plan *plan, const long *wanted, long features,
                  float *caught, const float *norm, float eps, float *last, const void *head, int format, float *logits, long vocabulary,
                  int threads) {
    long widest = 0, rotated = 0, hidden = layers[0]->hidden, next = 0, at = -1; /* at: the table whose rows were copied last */
    for (long i = 0; i < count; i++) {
        widest = max(widest, 2L * (layers[i]->heads + layers[i]->kv_heads) * layers[i]->head_dim);
        rotated = max(rotated, layers[i]->rotary_dim);
    }
    float *scratch = malloc(n * (widest + 2 * rotated) * sizeof(float)), *cosines = scratch + n * widest, *sines = cosines + n * rotated;
    for (long i = 0; i <= count; i++) {
        for (; next < features && wanted[next] == i; next++)
            for (long r = 0; r < n; r++)
                memcpy(caught + (r * features + next) * hidden, x + r * hidden, hidden * sizeof(float));
        if (i == count) break;
        const float *const *pair = tables + 2 * forms[i].table;
        if (placed && at != forms[i].table) place(plan, pair[0], pair[1], layers[i]->rotary_dim, cosines, sines), at = forms[i].table;
        full_layer(layers[i], forms + i, buffers + i, x, x, n, placed ? cosines : pair[0], placed ? sines : pair[1], plan, scratch,
                   threads);
    }
    free(scratch);
    if (norm) rms_norm(x, norm, eps, last, n, hidden);
    if (head) skinny_linear(last, n, hidden, head, format, logits, vocabulary, threads);
}

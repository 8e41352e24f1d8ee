/* Linear layers for CPUs: y = x W^T for the few rows of a decoding step up to the thousands of a prefill. cpu_layers.c includes
 * this file behind cpu.c.
 *
 * W [out, in] is stored in panels of 32 outputs, so that a core streams one panel from front to back and keeps the sums of a block of
 * rows in registers. A panel is multiplied in chunks that fit a core's own caches, each by all blocks of rows before the next
 * one. A row's sums are formed in the order of its inputs by the same instructions whatever the number of rows.
 *
 *     format         panel                                      product
 *     FLOAT32        [in][32] float32                           float32 multiply-add
 *     BFLOAT16       [in / 2][32][2] bfloat16, `in` padded      the same: weights are widened in registers, exactly
 *     INT8           [in][32] int8, then [32] float32 factors   the same; the factor multiplies the finished sum
 *     BFLOAT16_DOT   as BFLOAT16                                x is rounded to bfloat16; pairs of bfloat16 products are added to
 *                                                               float32 sums by AVX512-BF16, AMX or NEON's BF16 instructions;
 *                                                               as BFLOAT16 on other processors
 *     TWELVE         the weights of BFLOAT16 in three quarters  as BFLOAT16 and BFLOAT16_DOT, by the same instructions on the same
 *     TWELVE_DOT     of the bytes, see "weights in 12 bits"     numbers: the same bits
 */
#include <omp.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#else
#define TILES 0
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

enum format { FLOAT32, BFLOAT16, INT8, BFLOAT16_DOT, TWELVE, TWELVE_DOT }; /* as in ops/packing.py */

#define PANEL 32
#define CHUNK 1024 /* inputs: 64 KiB of bfloat16 weights */
#define AHEAD 4096 /* bytes of prefetching for a single block of rows; 2 to 8 KiB measure alike */
#define FAR_AHEAD 16384 /* for several rows of weights in 12 bits, whose instructions leave the processor less to look ahead by itself */
#define GROUP 64   /* rows that are multiplied together; a panel is multiplied by all groups before the next panel */

/* WIDTH: float32 lanes of a register. The sums of a block of MAX_ROWS rows with PANEL / SPLIT outputs fill most registers; up to
 * WHOLE_ROWS rows the sums of all outputs fit. */
#if defined(__AVX512F__)
enum { WIDTH = 16, MAX_ROWS = 12, WHOLE_ROWS = 12, SPLIT = 1 };
#elif defined(__AVX__)
enum { WIDTH = 8, MAX_ROWS = 5, WHOLE_ROWS = 2, SPLIT = 2 };
#elif defined(__ARM_NEON)
enum { WIDTH = 4, MAX_ROWS = 6, WHOLE_ROWS = 2, SPLIT = 2 };
#else
enum { WIDTH = 4, MAX_ROWS = 3, WHOLE_ROWS = 1, SPLIT = 2 };
#endif
enum { REGISTERS = PANEL / WIDTH };

typedef float reg __attribute__((vector_size(4 * WIDTH)));
typedef float reg_at __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias)); /* in memory */
typedef uint32_t reg_words __attribute__((vector_size(4 * WIDTH)));
typedef int32_t reg_ints __attribute__((vector_size(4 * WIDTH)));
typedef int8_t reg_bytes __attribute__((vector_size(WIDTH)));

/* sum + a.even * b.even + a.odd * b.odd for words of two bfloat16 numbers. */
#if defined(__AVX512BF16__)
#define HAS_DOT 1
static inline reg dot(reg sum, reg_words a, reg_words b) { return (reg)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_DOT 1
static inline reg dot(reg sum, reg_words a, reg_words b) {
    return (reg)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#else
#define HAS_DOT 0
static inline reg dot(reg sum, reg_words a, reg_words b) { return (void)a, (void)b, sum; }
#endif

static inline reg from_bytes(const char *at) {
#if defined(__AVX512F__) /* one instruction, which GCC does not generate from the generic form */
    return (reg)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)at)));
#elif defined(__AVX2__)
    return (reg)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)at)));
#else
    reg_bytes numbers;
    memcpy(&numbers, at, sizeof numbers);
    return __builtin_convertvector(__builtin_convertvector(numbers, reg_ints), reg);
#endif
}

static inline reg_words words_at(const char *at) {
    reg_words w;
    memcpy(&w, at, sizeof w);
    return w;
}

/* -- weights in 12 bits --------------------------------------------------------------------------------------------- */

/* Few exponents occur in a trained weight matrix: 16 of them cover all but some 0.01 % of the weights of a panel. A weight is a byte
 * of sign and mantissa and four bits that name its exponent, in quads of four inputs x 32 outputs; the others ("rest") are listed with
 * their places. A chunk is unpacked into the core's first cache, just before it is multiplied there as BFLOAT16: every word is
 * restored to the bit, and the memory sends three quarters of the bytes. Known on GPUs as DFloat11 (arXiv 2504.11651), in 11 bits.
 *
 *     matrix   panels, then the rest of all panels
 *     panel    a legend, then quads
 *     quad     [2 pairs of inputs][64] bytes of sign and mantissa, [64] bytes of names: the low four bits are of the first pair
 *
 * Byte i of 64 is output i / 16 * 4 + i % 8 / 2, input i % 2 of the pair, 16 outputs later where i & 8: what two interleaves of
 * 128-bit lanes put in order. */
enum { QUAD = 192, QUAD_WORDS = 128, NAMES = 16, TWELVE_CHUNK = 256 /* inputs: 16 KiB of bfloat16 weights */ };

struct legend { uint8_t exponents[NAMES]; int32_t first, rest; uint8_t unused[40]; }; /* rest: weights of the panel without a name */
struct rest { uint32_t place, word; }; /* place: of the word in a BFLOAT16 panel */

#if defined(__AVX512BW__)
typedef uint8_t bytes __attribute__((vector_size(64)));
static inline bytes look_up(bytes table, bytes names) { return (bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)names); }
static inline bytes first_halves(bytes a, bytes b) { return (bytes)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
static inline bytes last_halves(bytes a, bytes b) { return (bytes)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
typedef uint8_t bytes __attribute__((vector_size(32)));
static inline bytes look_up(bytes table, bytes names) { return (bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)names); }
static inline bytes first_halves(bytes a, bytes b) { return (bytes)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }
static inline bytes last_halves(bytes a, bytes b) { return (bytes)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }
#elif defined(__ARM_NEON)
typedef uint8_t bytes __attribute__((vector_size(16)));
static inline bytes look_up(bytes table, bytes names) { return (bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)names); }
static inline bytes first_halves(bytes a, bytes b) { return (bytes)vzip1q_u8((uint8x16_t)a, (uint8x16_t)b); }
static inline bytes last_halves(bytes a, bytes b) { return (bytes)vzip2q_u8((uint8x16_t)a, (uint8x16_t)b); }
#else
typedef uint8_t bytes __attribute__((vector_size(16)));
static inline bytes look_up(bytes table, bytes names) {
    bytes found;
    for (int i = 0; i < 16; i++) found[i] = table[names[i]];
    return found;
}
static inline bytes zipped(bytes a, bytes b, int from) {
    bytes both;
    for (int i = 0; i < 8; i++) both[2 * i] = a[from + i], both[2 * i + 1] = b[from + i];
    return both;
}
static inline bytes first_halves(bytes a, bytes b) { return zipped(a, b, 0); }
static inline bytes last_halves(bytes a, bytes b) { return zipped(a, b, 8); }
#endif

static inline bytes bytes_at(const char *at) {
    bytes b;
    memcpy(&b, at, sizeof b);
    return b;
}

/* A panel's quads and what they are unpacked by. upper, lowest: of each name's exponent, its upper seven bits, and its lowest above a
 * mantissa. */
struct twelve {
    const char *quads;
    bytes upper, lowest;
    const struct rest *next, *end; /* of the panel's rest, those that are not unpacked yet */
};

static inline struct twelve begin_twelve(const char *panel, const struct rest *all) {
    const struct legend *legend = (const void *)panel;
    bytes exponents;
    for (unsigned long i = 0; i < sizeof exponents; i += NAMES) memcpy((char *)&exponents + i, legend->exponents, NAMES);
    const struct rest *first = all + legend->first, *end = first + legend->rest;
    __builtin_prefetch(end); /* where the next panel's begins */
    return (struct twelve){panel + sizeof *legend, exponents >> 1, exponents << 7, first, end};
}

/* A quad of a panel as BFLOAT16 weights. Quads are unpacked in their order. */
static inline __attribute__((always_inline)) void unpack_quad(struct twelve *t, long quad, char *to) {
    const char *from = t->quads + quad * QUAD;
    for (long at = 0; at < 64; at += sizeof(bytes)) {
        bytes names = bytes_at(from + 128 + at);
        for (int pair = 0; pair < 2; pair++) {
            bytes name = pair ? names >> 4 : names & 15, rounded = bytes_at(from + 64 * pair + at);
            bytes high = (rounded & 0x80) | look_up(t->upper, name), low = (rounded & 0x7f) | look_up(t->lowest, name);
            bytes first = first_halves(low, high), last = last_halves(low, high);
            memcpy(to + 128 * pair + at, &first, sizeof first);
            memcpy(to + 128 * pair + 64 + at, &last, sizeof last);
        }
    }
    for (; t->next < t->end && t->next->place < (quad + 1) * QUAD_WORDS; t->next++) {
        uint16_t word = (uint16_t)t->next->word;
        memcpy(to + 2 * (t->next->place - quad * QUAD_WORDS), &word, sizeof word);
    }
}

/* A block of rows times a chunk of a panel. x: float32, or bfloat16 for BFLOAT16_DOT, from row to row `stride` bytes. units: inputs,
 * or pairs of them. Each unit prefetches at `fetch`, which moves by `step`. tile [rows, PANEL] is added to. */
struct block {
    const char *x;
    long stride, units;
    const char *panel, *fetch;
    long step;
    float *tile;
};

static inline uint32_t word_at(const char *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline float float_at(const char *at) {
    float number;
    memcpy(&number, at, sizeof number);
    return number;
}

/* sum += the products of a unit: its weights and x of every fourth row. Like the first three arguments of `multiply`, numbers of rows
 * and registers and the format are constants in every call, so the loops unroll and the sums stay in registers. */
static inline __attribute__((always_inline)) void add_unit(int rows, int registers, enum format format, const char *panel,
                                                           const char *const *x, long stride, reg (*sum)[REGISTERS]) {
    for (int s = 0; s < (format == BFLOAT16 ? 2 : 1); s++) {
        reg weight[REGISTERS];
        for (int v = 0; v < registers; v++) {
            if (format == INT8) weight[v] = from_bytes(panel + v * WIDTH);
            else {
                reg_words w = words_at(panel + v * sizeof w);
                weight[v] = (reg)(format != BFLOAT16 ? w : s ? w & 0xffff0000u : w << 16);
            }
        }
        for (int r = 0; r < rows; r++) {
            const char *at = x[r / 4] + r % 4 * stride + 4 * s;
            for (int v = 0; v < registers; v++)
                if (format == BFLOAT16_DOT) sum[r][v] = dot(sum[r][v], (reg_words)weight[v], (reg_words){0} + word_at(at));
                else sum[r][v] += weight[v] * float_at(at);
        }
    }
}

static inline __attribute__((always_inline)) void multiply(int rows, int registers, enum format format, const struct block *b) {
    reg sum[MAX_ROWS][REGISTERS];
    const char *panel = b->panel, *fetch = b->fetch, *x[MAX_ROWS / 4 + 1]; /* of every fourth row: few addresses */
    long step = b->step;
    for (int r = 0; r < rows; r += 4) x[r / 4] = b->x + r * b->stride;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < registers; v++) sum[r][v] = *(const reg_at *)(b->tile + r * PANEL + v * WIDTH);
    for (long unit = b->units; unit > 0; unit--) {
        __builtin_prefetch(fetch);
        if (format != INT8) __builtin_prefetch(fetch + 64);
        add_unit(rows, registers, format, panel, x, b->stride, sum);
        panel += PANEL * (format == INT8 ? 1 : 4);
        fetch += step;
        for (int r = 0; r < rows; r += 4) x[r / 4] += format == BFLOAT16 ? 8 : 4;
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < registers; v++) *(reg_at *)(b->tile + r * PANEL + v * WIDTH) = sum[r][v];
}

/* The product of a panel in 12 bits, whose quads are unpacked between the products; of few rows, whose sums of all outputs fit the
 * registers. b->panel is not read. */
static inline __attribute__((always_inline)) void multiply_quads(int rows, enum format format, struct twelve *t, const struct block *b) {
    reg sum[WHOLE_ROWS][REGISTERS] = {{{0}}};
    char quad[2 * QUAD_WORDS] __attribute__((aligned(64)));
    const char *x[WHOLE_ROWS / 4 + 1];
    for (int r = 0; r < rows; r += 4) x[r / 4] = b->x + r * b->stride;
    for (long q = 0; q < b->units / 2; q++) {
        for (long line = 0; line < QUAD; line += 64) __builtin_prefetch(b->fetch + q * b->step + line);
        unpack_quad(t, q, quad);
        for (int pair = 0; pair < 2; pair++) {
            add_unit(rows, REGISTERS, format, quad + pair * QUAD_WORDS, x, b->stride, sum);
            for (int r = 0; r < rows; r += 4) x[r / 4] += format == BFLOAT16 ? 8 : 4;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < REGISTERS; v++) *(reg_at *)(b->tile + r * PANEL + v * WIDTH) = sum[r][v];
}

#define QUADS(R) case R: if (R <= WHOLE_ROWS) multiply_quads(R, format, t, b); break;
static inline __attribute__((always_inline)) void quads_by_rows(int rows, enum format format, struct twelve *t, const struct block *b) {
    switch (rows) { QUADS(1) QUADS(2) QUADS(3) QUADS(4) QUADS(5) QUADS(6) QUADS(7) QUADS(8) QUADS(9) QUADS(10) QUADS(11) QUADS(12) }
}

#define CASE(R) case R: if (R <= most) multiply(R, registers, format, b); break;
static inline __attribute__((always_inline)) void by_rows(int rows, int most, int registers, enum format format, const struct block *b) {
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) }
}

/* All outputs of a block, in SPLIT parts where its sums do not fit the registers. */
static inline __attribute__((always_inline)) void multiply_parts(int rows, enum format format, const struct block *b) {
    if (rows <= WHOLE_ROWS) by_rows(rows, WHOLE_ROWS, REGISTERS, format, b);
    else
        for (int part = 0; part < SPLIT; part++) {
            struct block own = *b;
            own.panel += part * (PANEL / SPLIT) * (format == INT8 ? 1 : 4);
            own.tile += part * (PANEL / SPLIT);
            by_rows(rows, MAX_ROWS, REGISTERS / SPLIT, format, &own);
        }
}

static void multiply_block(int rows, enum format format, const struct block *b) {
    switch (format) {
        case FLOAT32: multiply_parts(rows, FLOAT32, b); break;
        case BFLOAT16: multiply_parts(rows, BFLOAT16, b); break;
        case INT8: multiply_parts(rows, INT8, b); break;
        case BFLOAT16_DOT: if (HAS_DOT) multiply_parts(rows, BFLOAT16_DOT, b); break;
        default: break; /* TWELVE is unpacked before */
    }
}

/* -- AMX ------------------------------------------------------------------------------------------------------------ */

static int has_tiles; /* set once, when the library is loaded */

#if TILES
__attribute__((constructor)) static void ask_for_tiles(void) { /* Linux grants the state of tiles per process, on request */
    has_tiles = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */);
}

static void begin_tiles(void) {
    if (!has_tiles) return;
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
}

/* Two or one tiles of 16 rows times a panel: x bfloat16 by `stride` bytes, whose rows and inputs are padded with zeros. */
static inline __attribute__((always_inline)) void multiply_tiles(int two, const char *x, long stride, long pairs, const char *panel,
                                                                 const char *fetch, long step, float *tile) {
    char last[16 * PANEL * 4];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < pairs; k += 16, panel += sizeof last, fetch += step) {
        const char *weights = panel;
        for (long i = 0; i < (long)sizeof last; i += 64) __builtin_prefetch(fetch + i);
        if (pairs - k < 16) {
            memset(last, 0, sizeof last);
            weights = memcpy(last, panel, (pairs - k) * PANEL * 4);
        }
        _tile_loadd(6, weights, PANEL * 4);
        _tile_loadd(7, weights + 64, PANEL * 4);
        _tile_loadd(4, x + 4 * k, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + 4 * k + 16 * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, tile, PANEL * 4);
    _tile_stored(1, tile + 16, PANEL * 4);
    if (two) {
        _tile_stored(2, tile + 16 * PANEL, PANEL * 4);
        _tile_stored(3, tile + 16 * PANEL + 16, PANEL * 4);
    }
}

static void multiply_by_tiles(long rows, const char *x, long stride, long pairs, const char *panel, const char *limit, float *tile) {
    long blocks = (rows + 31) / 32, size = pairs * PANEL * 4;
    for (long b = 0; b < blocks; b++, x += 32 * stride, tile += 32 * PANEL) {
        const char *fetch = blocks == 1 ? panel + AHEAD : panel + size + b * size / blocks;
        long step = fetch < limit ? 2048 / blocks : 0;
        if (rows - 32 * b > 16) multiply_tiles(1, x, stride, pairs, panel, step ? fetch : panel, step, tile);
        else multiply_tiles(0, x, stride, pairs, panel, step ? fetch : panel, step, tile);
    }
}
#else
static void begin_tiles(void) {}
static void multiply_by_tiles(long rows, const char *x, long stride, long pairs, const char *panel, const char *limit, float *tile) {
    (void)rows, (void)x, (void)stride, (void)pairs, (void)panel, (void)limit, (void)tile;
}
#endif

static void end_tiles(void) {
#if TILES
    if (has_tiles) _tile_release();
#endif
}

/* The word of a BFLOAT16 panel, of 16 bits, at byte `at` of a quad's pair. */
static inline long place_of(long quad, int pair, int at) {
    return quad * QUAD_WORDS + pair * 64 + (at & 8) * 4 + at / 16 * 8 + at % 8;
}

/* legends [count]: the names of each BFLOAT16 panel's most frequent exponents, and how many weights are left without one.
 * words: 16-bit words of a panel. */
void name_exponents(const uint16_t *panels, long count, long words, struct legend *legends, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < count; p++) {
        uint32_t found[256] = {0};
        struct legend legend = {.rest = (int32_t)words};
        for (long i = 0; i < words; i++) found[panels[p * words + i] >> 7 & 255]++;
        for (int n = 0; n < NAMES; n++) {
            int most = 0;
            for (int e = 1; e < 256; e++)
                if (found[e] > found[most]) most = e;
            legend.exponents[n] = (uint8_t)most;
            legend.rest -= (int32_t)found[most];
            found[most] = 0;
        }
        legends[p] = legend;
    }
}

/* BFLOAT16 panels to TWELVE. legends: of name_exponents, with their `first`; words: of a panel, whole quads. */
void pack_twelve(const uint16_t *panels, long count, long words, const struct legend *legends, char *packed, int threads) {
    long quads = words / QUAD_WORDS, size = quads * QUAD + (long)sizeof(struct legend);
    struct rest *all = (void *)(packed + count * size);
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < count; p++) {
        const uint16_t *panel = panels + p * words;
        struct rest *next = all + legends[p].first;
        uint8_t *to = (uint8_t *)packed + p * size, names[256];
        memcpy(to, legends + p, sizeof *legends);
        to += sizeof *legends;
        memset(names, NAMES, sizeof names);
        for (int n = NAMES - 1; n >= 0; n--) names[legends[p].exponents[n]] = (uint8_t)n;
        for (long i = 0; i < words; i++)
            if (names[panel[i] >> 7 & 255] == NAMES) *next++ = (struct rest){(uint32_t)i, panel[i]};
        for (long q = 0; q < quads; q++, to += QUAD)
            for (int i = 0; i < 64; i++) {
                uint16_t first = panel[place_of(q, 0, i)], last = panel[place_of(q, 1, i)];
                to[i] = (uint8_t)((first >> 8 & 0x80) | (first & 0x7f));
                to[64 + i] = (uint8_t)((last >> 8 & 0x80) | (last & 0x7f));
                to[128 + i] = (uint8_t)((names[first >> 7 & 255] & 15) | (names[last >> 7 & 255] & 15) << 4);
            }
    }
}

/* -- the product ---------------------------------------------------------------------------------------------------- */

/* What a linear layer reads. x: as in struct block, `stride` bytes from row to row. size: bytes of a panel. format: of the product,
 * so never TWELVE; twelve: whether weights are unpacked before; rest: of all panels. */
struct operands {
    const char *x;
    long stride, in, size;
    enum format format;
    int twelve;
    const struct rest *rest;
};

static long panel_size(long in, enum format format) {
    if (format == INT8) return in * PANEL + PANEL * (long)sizeof(float);
    if (format >= TWELVE) return (in + 3) / 4 * QUAD + (long)sizeof(struct legend);
    return format == FLOAT32 ? in * PANEL * (long)sizeof(float) : (in + 1) / 2 * PANEL * 4;
}

static uint32_t bfloat16(float x) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* A copy of x [rows, in] in bfloat16, or as it is; inputs are padded with zeros, and rows to whole tiles where there are tiles. The
 * caller frees it. */
static char *copy_inputs(const float *x, long rows, long in, int round, long *stride, int threads) {
    long size = round ? 2 : 4, padded = has_tiles ? (rows + 31) / 32 * 32 : rows;
    *stride = ((in + 31) / 32 * 32 + 32) * size; /* no power of two, whose rows would share few lines of the cache */
    char *copy = aligned_alloc(64, padded * *stride);
#pragma omp parallel for num_threads(threads) if (rows * in > 16384)
    for (long r = 0; r < padded; r++) {
        char *row = copy + r * *stride;
        long done = r < rows ? in : 0;
        if (!round) memcpy(row, x + r * in, done * size);
        for (long i = 0; round && i < done; i++) ((uint16_t *)row)[i] = (uint16_t)bfloat16(x[r * in + i]);
        memset(row + done * size, 0, *stride - done * size);
    }
    return copy;
}

/* Rows of each block when blocks have nearly equal size: 16 rows are 8 + 8, not 12 + 4. */
static long next_rows(long rows, long done) {
    long blocks = (rows - done + MAX_ROWS - 1) / MAX_ROWS;
    return (rows - done + blocks - 1) / blocks;
}

/* Multiplies up to GROUP rows with a chunk of a panel: weights and x of its first unit. fetch: where what this thread reads next
 * begins, `bytes` of it; each block of rows fetches its part. */
static void multiply_chunk(const struct operands *o, const char *x, long rows, long units, const char *weights, const char *fetch,
                           long bytes, const char *limit, float *tile) {
    long blocks = (rows + MAX_ROWS - 1) / MAX_ROWS, step = bytes / units / blocks;
    struct block b = {x, o->stride, units, weights, NULL, step, tile};
    for (long row = 0, n; row < rows; row += n) {
        n = next_rows(rows, row);
        b.fetch = fetch < limit ? fetch : weights;
        multiply_block((int)n, o->format, &b);
        b.x += n * b.stride, b.tile += n * PANEL, fetch += step * units;
    }
}

/* Blocks of rows whose sums of all outputs fit the registers, times a panel in 12 bits, which each block unpacks anew. A single block
 * fetches what it reads next, several fetch the next panel, each its part. */
static void multiply_unpacked(const struct operands *o, const char *x, long rows, const char *panel, const char *limit, float *tile) {
    long quads = (o->in + 3) / 4, blocks = (rows + WHOLE_ROWS - 1) / WHOLE_ROWS;
    for (long row = 0, block = 0, n; row < rows; row += n, block++) {
        struct twelve t = begin_twelve(panel, o->rest);
        const char *next = t.quads + quads * QUAD;
        const char *fetch = blocks == 1 ? t.quads + (rows > 2 ? FAR_AHEAD : AHEAD) : next + block * quads / blocks * QUAD;
        struct block b = {x + row * o->stride, o->stride, 2 * quads, NULL, fetch, QUAD / blocks, tile + row * PANEL};
        if (fetch >= limit) b.fetch = t.quads;
        n = next_rows(rows, row);
        if (o->format == BFLOAT16_DOT && HAS_DOT) quads_by_rows((int)n, BFLOAT16_DOT, &t, &b);
        else quads_by_rows((int)n, BFLOAT16, &t, &b);
    }
}

/* Whether unpacking hides behind the products, so that a panel is unpacked for each block of rows and not before all. */
static int unpacks_each(const struct operands *o, long rows) {
    if (o->format == BFLOAT16_DOT && has_tiles) return 0;
    int hidden = o->format == BFLOAT16_DOT && HAS_DOT && WHOLE_ROWS == MAX_ROWS;
    return hidden || rows <= WHOLE_ROWS;
}

/* As multiply_panel, for weights in 12 bits. buffer: a chunk's weights, or with `keep` the panel's, where `fresh` says that they
 * are not unpacked yet. */
static void multiply_twelve(const struct operands *o, const char *x, long rows, const char *panel, const char *limit, char *buffer,
                            int keep, int fresh, float *tile) {
    long quads = (o->in + 3) / 4, most = TWELVE_CHUNK / 4, chunks = (quads + most - 1) / most;
    struct twelve t = begin_twelve(panel, o->rest);
    int tiles = o->format == BFLOAT16_DOT && has_tiles;
    long input = o->format == BFLOAT16 ? 16 : 8; /* bytes of x per quad */
    for (long c = 0; c < chunks; c++) {
        long done = quads * c / chunks, end = quads * (c + 1) / chunks;
        char *weights = buffer + (keep ? done * 2 * QUAD_WORDS : 0);
        for (long q = done; fresh && q < end; q++) unpack_quad(&t, q, weights + (q - done) * 2 * QUAD_WORDS);
        long bytes = fresh ? (end - done) * QUAD : 0;
        if (!tiles)
            multiply_chunk(o, x + done * input, rows, 2 * (end - done), weights, t.quads + end * QUAD, bytes, limit, tile);
    }
    if (tiles) multiply_by_tiles(rows, x, o->stride, 2 * quads, buffer, buffer, tile);
}

/* tile [rows, PANEL] = the product of up to GROUP rows with a panel. limit: end of the panels that this thread will read. */
static void multiply_panel(const struct operands *o, const char *x, long rows, const char *panel, const char *limit, float *tile) {
    if (o->format == BFLOAT16_DOT && has_tiles) {
        multiply_by_tiles(rows, x, o->stride, (o->in + 1) / 2, panel, limit, tile);
        return;
    }
    long per = o->format == BFLOAT16 || o->format == BFLOAT16_DOT ? 2 : 1, unit = PANEL * (o->format == INT8 ? 1 : 4);
    long units = (o->in + per - 1) / per, most = CHUNK / per, chunks = (units + most - 1) / most;
    long input = o->format == BFLOAT16 ? 8 : 4; /* bytes of x per unit */
    for (long c = 0; c < chunks; c++) {
        long done = units * c / chunks, chunk = units * (c + 1) / chunks - done;
        const char *weights = panel + done * unit, *fetch = weights + (rows <= MAX_ROWS ? AHEAD : chunk * unit);
        multiply_chunk(o, x + done * input, rows, chunk, weights, fetch, chunk * unit, limit, tile);
    }
    if (o->format == INT8) {
        const float *factor = (const void *)(panel + o->in * PANEL);
        for (long r = 0; r < rows; r++)
            for (int i = 0; i < PANEL; i++) tile[r * PANEL + i] *= factor[i];
    }
}

/* y [rows, out] = x [rows, in] W^T, or gated: act(gate(x)) * up(x), where panels of gate and up alternate, so that both products
 * are in the core's own cache when they are multiplied. The last panel of each matrix is padded. */
static void linear(const float *x, long rows, long in, const void *panels, int format, float *y, long out, enum activation act,
                   int threads) {
    struct operands o = {(const char *)x, in * (long)sizeof(float), in, panel_size(in, format), format, format >= TWELVE, NULL};
    if (o.twelve) o.format = format == TWELVE_DOT ? BFLOAT16_DOT : BFLOAT16;
    if (o.format == BFLOAT16_DOT && !HAS_DOT && !has_tiles) o.format = BFLOAT16;
    char *copy = NULL;
    long whole = o.twelve ? 4 : 2; /* inputs that are multiplied together */
    if (o.format == BFLOAT16_DOT || (o.format == BFLOAT16 && in % whole))
        o.x = copy = copy_inputs(x, rows, in, o.format == BFLOAT16_DOT, &o.stride, threads);
    long count = (out + PANEL - 1) / PANEL, groups = (rows + GROUP - 1) / GROUP, tasks = count * groups, each = (act ? 2 : 1) * o.size;
    o.rest = (const void *)((const char *)panels + count * each);
    int each_block = o.twelve && unpacks_each(&o, rows), keep = groups > 1 || (o.format == BFLOAT16_DOT && has_tiles);
    long held = o.twelve && !each_block ? 2 * QUAD_WORDS * (keep ? (in + 3) / 4 : TWELVE_CHUNK / 4) : 0; /* bytes of unpacked weights */
#pragma omp parallel num_threads(threads)
    {
        float tiles[2][GROUP * PANEL] __attribute__((aligned(64))); /* of the outputs, or of gate and up */
        char *buffer = held ? aligned_alloc(64, 2 * held) : NULL;
        long thread = omp_get_thread_num(), team = omp_get_num_threads(), begin = tasks * thread / team, end = tasks * (thread + 1) / team;
        if (o.format == BFLOAT16_DOT) begin_tiles();
        for (long task = begin; task < end; task++) {
            long p = task / groups, row = task % groups * GROUP, n = min(rows - row, GROUP), width = min(out - p * PANEL, PANEL);
            const char *panel = (const char *)panels + p * each, *limit = panel + each;
            if (row + n == rows) limit = (const char *)panels + ((end - 1) / groups + 1) * each; /* no rows are left for this panel */
            int fresh = row == 0 || task == begin;
            for (int half = 0; half < (act ? 2 : 1); half++, panel += o.size) {
                float *tile = tiles[half];
                memset(tile, 0, n * PANEL * sizeof(float));
                if (each_block) multiply_unpacked(&o, o.x + row * o.stride, n, panel, limit, tile);
                else if (o.twelve) multiply_twelve(&o, o.x + row * o.stride, n, panel, limit, buffer + half * held, keep, fresh, tile);
                else multiply_panel(&o, o.x + row * o.stride, n, panel, limit, tile);
            }
            float *tile = tiles[0];
            for (long i = 0; act && i < n * PANEL; i += LANES) store(tile + i, activate(load(tile + i), act) * load(tiles[1] + i));
            for (long r = 0; r < n; r++) memcpy(y + (row + r) * out + p * PANEL, tile + r * PANEL, width * sizeof(float));
        }
        if (o.format == BFLOAT16_DOT) end_tiles();
        free(buffer);
    }
    free(copy);
}

void skinny_linear(const float *x, long rows, long in, const void *panels, int format, float *y, long out, int threads) {
    linear(x, rows, in, panels, format, y, out, NONE, threads);
}

/* The instructions that this build uses. */
const char *kernel_path(void) {
#if TILES
    if (has_tiles) return "amx";
#endif
#if defined(__AVX512BF16__)
    return "avx512bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#elif defined(__ARM_NEON)
    return HAS_DOT ? "neon-bf16" : "neon";
#else
    return "baseline";
#endif
}

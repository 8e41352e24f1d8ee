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

enum format { FLOAT32, BFLOAT16, INT8, BFLOAT16_DOT }; /* as in ops/packing.py */

#define PANEL 32
#define CHUNK 1024 /* inputs: 64 KiB of bfloat16 weights */
#define AHEAD 4096 /* bytes of prefetching for a single block of rows; 2 to 8 KiB measure alike */
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

/* The first three arguments are constants in every call, so the loops unroll and the sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(int rows, int registers, enum format format, const struct block *b) {
    reg sum[MAX_ROWS][REGISTERS];
    const char *panel = b->panel, *fetch = b->fetch, *x[MAX_ROWS / 4 + 1]; /* of every fourth row: few addresses */
    long stride = b->stride, step = b->step;
    for (int r = 0; r < rows; r += 4) x[r / 4] = b->x + r * stride;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < registers; v++) sum[r][v] = *(const reg_at *)(b->tile + r * PANEL + v * WIDTH);
    for (long unit = b->units; unit > 0; unit--) {
        __builtin_prefetch(fetch);
        if (format != INT8) __builtin_prefetch(fetch + 64);
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
        panel += PANEL * (format == INT8 ? 1 : 4);
        fetch += step;
        for (int r = 0; r < rows; r += 4) x[r / 4] += format == BFLOAT16 ? 8 : 4;
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < registers; v++) *(reg_at *)(b->tile + r * PANEL + v * WIDTH) = sum[r][v];
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

/* -- the product ---------------------------------------------------------------------------------------------------- */

/* What a linear layer reads. x: as in struct block, `stride` bytes from row to row. size: bytes of a panel. */
struct operands {
    const char *x;
    long stride, in, size;
    enum format format;
};

static long panel_size(long in, enum format format) {
    if (format == INT8) return in * PANEL + PANEL * (long)sizeof(float);
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

/* tile [rows, PANEL] = the product of up to GROUP rows with a panel. limit: end of the panels that this thread will read. */
static void multiply_panel(const struct operands *o, const char *x, long rows, const char *panel, const char *limit, float *tile) {
    if (o->format == BFLOAT16_DOT && has_tiles) {
        multiply_by_tiles(rows, x, o->stride, (o->in + 1) / 2, panel, limit, tile);
        return;
    }
    long per = o->format == BFLOAT16 || o->format == BFLOAT16_DOT ? 2 : 1, unit = PANEL * (o->format == INT8 ? 1 : 4);
    long units = (o->in + per - 1) / per, most = CHUNK / per, chunks = (units + most - 1) / most;
    long blocks = (rows + MAX_ROWS - 1) / MAX_ROWS, input = o->format == BFLOAT16 ? 8 : 4; /* bytes of x per unit */
    memset(tile, 0, rows * PANEL * sizeof(float));
    for (long c = 0; c < chunks; c++) {
        long done = units * c / chunks, chunk = units * (c + 1) / chunks - done;
        struct block b = {x + done * input, o->stride, chunk, panel + done * unit, NULL, unit / blocks, tile};
        const char *fetch = b.panel + (blocks == 1 ? AHEAD : chunk * unit);
        for (long row = 0, n; row < rows; row += n) { /* each block fetches its part of the next chunk */
            n = next_rows(rows, row);
            b.fetch = fetch < limit ? fetch : b.panel;
            multiply_block((int)n, o->format, &b);
            b.x += n * b.stride, b.tile += n * PANEL, fetch += b.step * chunk;
        }
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
    if (format == BFLOAT16_DOT && !HAS_DOT && !has_tiles) format = BFLOAT16;
    struct operands o = {(const char *)x, in * (long)sizeof(float), in, panel_size(in, format), format};
    char *copy = NULL;
    if (format == BFLOAT16_DOT || (format == BFLOAT16 && in % 2))
        o.x = copy = copy_inputs(x, rows, in, format == BFLOAT16_DOT, &o.stride, threads);
    long count = (out + PANEL - 1) / PANEL, groups = (rows + GROUP - 1) / GROUP, tasks = count * groups, each = (act ? 2 : 1) * o.size;
#pragma omp parallel num_threads(threads)
    {
        float tile[GROUP * PANEL] __attribute__((aligned(64))), up[GROUP * PANEL] __attribute__((aligned(64)));
        long thread = omp_get_thread_num(), team = omp_get_num_threads(), end = tasks * (thread + 1) / team;
        if (format == BFLOAT16_DOT) begin_tiles();
        for (long task = tasks * thread / team; task < end; task++) {
            long p = task / groups, row = task % groups * GROUP, n = min(rows - row, GROUP), width = min(out - p * PANEL, PANEL);
            const char *panel = (const char *)panels + p * each, *limit = panel + each;
            if (row + n == rows) limit = (const char *)panels + ((end - 1) / groups + 1) * each; /* no rows are left for this panel */
            multiply_panel(&o, o.x + row * o.stride, n, panel, limit, tile);
            if (act) multiply_panel(&o, o.x + row * o.stride, n, panel + o.size, limit, up);
            for (long i = 0; act && i < n * PANEL; i += LANES) store(tile + i, activate(load(tile + i), act) * load(up + i));
            for (long r = 0; r < n; r++) memcpy(y + (row + r) * out + p * PANEL, tile + r * PANEL, width * sizeof(float));
        }
        if (format == BFLOAT16_DOT) end_tiles();
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

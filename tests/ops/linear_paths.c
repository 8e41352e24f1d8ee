/* Checks cpu_linear.c as it is built for one path: sums against float64, weights in 12 bits against the same ones in 16, and a row's bits
 * alone, among others and in other threads. test_cpu_paths.py builds and runs it. EMULATED_TILES: AMX instructions are functions of
 * this file. */
#include "cpu.c"

#include <pthread.h>
#include <stdio.h>

#ifdef EMULATED_TILES
#define __AMX_BF16__ 1
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_release
#define _tile_loadd read_tile
#define _tile_stored write_tile
#define _tile_zero(t) memset(tiles[t], 0, sizeof tiles[t])
#define _tile_dpbf16ps multiply_tile
#define _tile_loadconfig(config) (configured = ((const uint8_t *)(config))[0])
#define _tile_release() (configured = 0)
static _Thread_local uint32_t tiles[8][16][16];
static _Thread_local int configured;

static void read_tile(int t, const void *at, long stride) {
    for (int r = 0; r < 16; r++) memcpy(tiles[t][r], (const char *)at + r * stride, 64);
}

static void write_tile(int t, void *at, long stride) {
    for (int r = 0; r < 16; r++) memcpy((char *)at + r * stride, tiles[t][r], 64);
}

static float widened(uint32_t half) {
    uint32_t bits = half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void multiply_tile(int sums, int left, int right) {
    if (!configured) exit(3);
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 16; c++) {
            float sum;
            memcpy(&sum, &tiles[sums][r][c], sizeof sum);
            for (int k = 0; k < 16; k++) {
                uint32_t a = tiles[left][r][k], b = tiles[right][k][c];
                sum += widened(a & 0xffff) * widened(b & 0xffff) + widened(a >> 16) * widened(b >> 16);
            }
            memcpy(&tiles[sums][r][c], &sum, sizeof sum);
        }
}
#endif

#include "cpu_linear.c"

enum { ROWS = 130, FEW = 64, THREADS = 3 };
static const char *const FORMS[] = {"float32", "bfloat16", "int8", "bfloat16 products", "12 bits", "12 bits, bfloat16 products"};

static float number(void) { /* in [-1, 1) */
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

static float rounded(float x) {
    uint32_t bits = bfloat16(x) << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* One weight [out, in]: its panels and its values. */
struct weight { long out, in; int format; char *panels; double *values; };

static void put(const struct weight *w, char *panel, long o, long i, double *value) {
    float x = number();
    if (w->format == FLOAT32) memcpy(panel + (i * PANEL + o) * 4, &x, 4);
    if (w->format == BFLOAT16 || w->format == BFLOAT16_DOT) {
        if (i % 7 == 3) x = ldexpf(x, -(int)((o + i) % 60));
        uint16_t half = (uint16_t)bfloat16(x);
        x = rounded(x);
        memcpy(panel + ((i / 2 * PANEL + o) * 2 + i % 2) * 2, &half, 2);
    }
    if (w->format == INT8) {
        panel[i * PANEL + o] = (char)(x * 127);
        float factor = 0.01f * (float)(o + 1);
        memcpy(panel + w->in * PANEL + o * 4, &factor, 4);
        x = (float)(signed char)panel[i * PANEL + o] * factor;
    }
    *value = x;
}

/* The same weight in 12 bits. Some exponents are rare, so that not all get a name. */
static struct weight packed(const struct weight *w) {
    long count = (w->out + PANEL - 1) / PANEL, words = (w->in + 3) / 4 * QUAD_WORDS, size = panel_size(w->in, w->format), rest = 0;
    uint16_t *padded = calloc(count * words, 2);
    for (long p = 0; p < count; p++) memcpy(padded + p * words, w->panels + p * size, size);
    struct legend *legends = calloc(count, sizeof *legends);
    name_exponents(padded, count, words, legends, 2);
    for (long p = 0; p < count; rest += legends[p++].rest) legends[p].first = (int32_t)rest;
    struct weight twelve = {w->out, w->in, w->format == BFLOAT16 ? TWELVE : TWELVE_DOT, NULL, w->values};
    twelve.panels = aligned_alloc(64, (count * panel_size(w->in, TWELVE) + rest * sizeof(struct rest) + 63) / 64 * 64);
    pack_twelve(padded, count, words, legends, twelve.panels, 2);
    free(padded), free(legends);
    return twelve;
}

static struct weight make(long out, long in, int format) {
    long count = (out + PANEL - 1) / PANEL, size = panel_size(in, format);
    struct weight w = {out, in, format, calloc(count, size), calloc(out * in, sizeof(double))};
    for (long o = 0; o < out; o++)
        for (long i = 0; i < in; i++) put(&w, w.panels + o / PANEL * size, o % PANEL, i, w.values + o * in + i);
    return w;
}

struct call { const struct weight *w; const float *x; float *y; };

static void *run(void *given) {
    struct call *c = given;
    skinny_linear(c->x, FEW, c->w->in, c->w->panels, c->w->format, c->y, c->w->out, 2);
    return NULL;
}

/* Whether all rows are right, and equal to the bit however many are multiplied at once. */
static int check(const struct weight *w) {
    long out = w->out, in = w->in;
    float *x = malloc(ROWS * in * 4), *all = malloc(ROWS * out * 4), *some = malloc(THREADS * ROWS * out * 4);
    for (long i = 0; i < ROWS * in; i++) x[i] = number();
    skinny_linear(x, ROWS, in, w->panels, w->format, all, out, 1);
    int halves = (w->format == BFLOAT16_DOT || w->format == TWELVE_DOT) && (HAS_DOT || has_tiles), bad = 0;
    for (long r = 0; r < ROWS; r++)
        for (long o = 0; o < out; o++) {
            double sum = 0, size = 1e-3;
            for (long i = 0; i < in; i++) {
                double product = w->values[o * in + i] * (halves ? rounded(x[r * in + i]) : x[r * in + i]);
                sum += product, size += fabs(product);
            }
            bad |= !(fabs(all[r * out + o] - sum) < 1e-6 * size);
        }
    for (long rows = 1; rows <= FEW; rows++) {
        skinny_linear(x, rows, in, w->panels, w->format, some, out, rows % 16 ? 1 : 2);
        bad |= 2 * !!memcmp(all, some, rows * out * 4);
    }
    pthread_t threads[THREADS];
    struct call calls[THREADS];
    for (int t = 0; t < THREADS; t++) {
        calls[t] = (struct call){w, x, some + t * ROWS * out};
        pthread_create(threads + t, NULL, run, calls + t);
    }
    for (int t = 0; t < THREADS; t++) {
        pthread_join(threads[t], NULL);
        bad |= 4 * !!memcmp(all, calls[t].y, FEW * out * 4);
    }
    if (bad) printf("%s [%ld, %ld]: fault %d\n", FORMS[w->format], out, in, bad);
    free(x), free(all), free(some);
    return bad;
}

/* Whether products with two forms of a weight have other bits. */
static int differs(const struct weight *w, const struct weight *twelve) {
    float *x = malloc(ROWS * w->in * 4), *left = malloc(ROWS * w->out * 4), *right = malloc(ROWS * w->out * 4);
    int bad = 0;
    for (long i = 0; i < ROWS * w->in; i++) x[i] = number();
    for (long rows = 1; rows <= ROWS; rows += rows < 16 ? 1 : 57) {
        skinny_linear(x, rows, w->in, w->panels, w->format, left, w->out, 2);
        skinny_linear(x, rows, w->in, twelve->panels, twelve->format, right, w->out, 2);
        bad |= !!memcmp(left, right, rows * w->out * 4);
    }
    if (bad) printf("%s [%ld, %ld]: other bits\n", FORMS[twelve->format], w->out, w->in);
    free(x), free(left), free(right);
    return bad;
}

int main(void) {
    static const long shapes[][2] = {{1, 3}, {31, 17}, {33, 64}, {70, 129}, {40, 2100}};
    int bad = 0;
#ifdef EMULATED_TILES
    has_tiles = 1;
#endif
    for (int format = FLOAT32; format <= BFLOAT16_DOT; format++)
        for (int s = 0; s < 5; s++) {
            struct weight w = make(shapes[s][0], shapes[s][1], format);
            bad |= check(&w);
            if (format == BFLOAT16 || format == BFLOAT16_DOT) {
                struct weight twelve = packed(&w);
                bad |= check(&twelve) | 8 * differs(&w, &twelve);
                free(twelve.panels);
            }
            free(w.panels), free(w.values);
        }
    printf("%s\n", kernel_path());
    return bad;
}

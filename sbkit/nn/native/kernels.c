/* The steps between the matrix products of a Conformer layer, each in one pass over memory, forward and backward; and
   the update of weights.

   The kernels are written once and compiled twice: for activations T in float (names end in _f32) and in bfloat16
   (_bf16). All arithmetic is in float. Rows are frames, columns are features. Each thread sums over its own rows first,
   so that the same number of threads gives the same result; the caller passes zeros for such sums. Rows of up to WIDEST
   columns are kept in float on the stack. Kernels do not allocate memory. */

#include <omp.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))

/* Keeps element i if one[i] + odd * other[i], as a 16-bit integer, is at least lowest; one is null without dropout. */
typedef struct {
    const int16_t *restrict one, *restrict other;
    int32_t odd, lowest;
    float factor;
} Dropout;

static inline float kept(const Dropout drop, int64_t i) {
    const uint32_t sum = (uint16_t)drop.one[i] + (uint32_t)drop.odd * (uint16_t)drop.other[i];
    return (int16_t)(uint16_t)sum >= drop.lowest ? drop.factor : 0.0f;
}

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* exp(x) to 2 units in the last place, with operations that compilers vectorise; NaN stays NaN. */
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23, which rounds the sum to an integer */
    const float whole = shifted - 12582912.0f;
    const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * as_float((as_bits(shifted) << 23) + 0x3f800000u);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

static inline float silu(float x) { return x * sigmoid(x); }

static inline float silu_slope(float x) {
    const float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

static inline float from_bf16(uint16_t value) { return as_float((uint32_t)value << 16); }

/* Rounds to the nearest, ties to even. NaNs are not rounded, which would turn some into -0. */
static inline uint16_t to_bf16(float value) {
    const uint32_t bits = as_bits(value), number = (bits & 0x7fffffffu) > 0x7f800000u ? 0u : ~0u;
    return (uint16_t)((bits + ((0x7fffu + ((bits >> 16) & 1u)) & number)) >> 16);
}

/* Computes this thread's share of the rows, for kernels that sum over them. */
static inline void share(int64_t rows, int64_t *first, int64_t *end) {
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    *first = rows * me / threads;
    *end = rows * (me + 1) / threads;
}

/* Adds all rows of sums [threads, columns] to its first. */
static void gather(float *restrict sums, int64_t columns, int threads) {
    for (int t = 1; t < threads; t++)
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) sums[j] += sums[t * columns + j];
}

/* The blocks of a list of tensors that a thread computes, and the one that it is at. */
typedef struct {
    const int64_t *lengths, *starts; /* the values of each tensor, and the blocks of all tensors before it */
    int64_t next, end;               /* the next block, and the first one that is another thread's */
    int64_t tensor;                  /* where the block is: its tensor, its first value there, its number of values */
    int64_t first, size;
    int64_t number; /* of the block, among those of all tensors */
} Blocks;

static inline Blocks own_blocks(const int64_t *lengths, const int64_t *starts, int64_t count) {
    Blocks at = {.lengths = lengths, .starts = starts};
    share(starts[count], &at.next, &at.end);
    return at;
}

/* Moves on to the next block; 0 if there is none. */
static inline int next_block(Blocks *at) {
    if (at->next == at->end) return 0;
    at->number = at->next++;
    while (at->number >= at->starts[at->tensor + 1]) at->tensor++;
    at->first = (at->number - at->starts[at->tensor]) * BLOCK;
    const int64_t left = at->lengths[at->tensor] - at->first;
    at->size = left < BLOCK ? left : BLOCK;
    return 1;
}

#define LANES 32
/* The sum of squares in double, where the square of a float can neither overflow nor vanish. Its order is fixed: that
   of a reduction would follow from the processor, and ranks on several kinds would clip by other norms. */
static double squares(const float *restrict x, int64_t size) {
    double lanes[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
#pragma omp simd
        for (int64_t j = 0; j < LANES; j++) lanes[j] += (double)x[i + j] * x[i + j];
    for (int64_t j = 0; i < size; i++, j++) lanes[j] += (double)x[i] * x[i];
    for (int64_t j = 0; j < LANES; j++) sum += lanes[j];
    return sum;
}

static inline double power(double base, int64_t exponent) {
    double result = 1;
    for (; exponent > 0; exponent >>= 1, base *= base)
        if (exponent & 1) result *= base;
    return result;
}

#define T float
#define OUT(name) name##_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#include "rows.h"
#include "frames.h"
#include "update.h"
#undef T
#undef OUT
#undef LOAD
#undef STORE

#define T uint16_t
#define OUT(name) name##_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include "rows.h"
#include "frames.h"
#include "update.h"

/* Sums of rows of weights in 16 bits, which wrap: only whole sums need to fit.

   There is a list of rows for each pattern of time steps, in the order of a Gray code, in which neighbours differ in
   one step; that of no steps comes first, and is empty. `part` [step][width] gets the sum of a list at each of its
   steps. */
#ifndef LRFDYN_SUMS_H
#define LRFDYN_SUMS_H

#include "lrfdyn_maps.h"

#define PATTERNS 16 /* at most: of as many steps as are sorted together */

/* Vectors of 32, 16 or 8 sums in 16 bits, which wrap, and how eight bits from memory are widened to them. Where
   LRFDYN_PLAIN is defined, sums are as on a machine that has none. */
#if defined(LRFDYN_PLAIN)
#elif defined(__AVX512BW__)
#define VECTOR 32 /* as many as there are */
#define LEAST 16  /* and what is left of a width */
#elif defined(__AVX2__)
#define VECTOR 16
#define LEAST 16
#elif defined(__ARM_NEON) || defined(__SSE2__)
#define VECTOR 8
#define LEAST 8
#endif
#if defined(__AVX2__)
#include <immintrin.h>
typedef __m256i vector_16;
#define ZEROS_16() _mm256_setzero_si256()
#define LOAD_16(from) _mm256_loadu_si256((const __m256i *)(const void *)(from))
#define STORE_16(to, x) _mm256_storeu_si256((__m256i *)(void *)(to), x)
#define ADD_16(x, y) _mm256_add_epi16(x, y)
#define SUBTRACT_16(x, y) _mm256_sub_epi16(x, y)
#define SHIFT_16(x, places) _mm256_sll_epi16(x, _mm_cvtsi32_si128(places))
#define BYTES_16(from) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(from)))
#endif
#if defined(__AVX512BW__)
typedef __m512i vector_32;
#define ZEROS_32() _mm512_setzero_si512()
#define LOAD_32(from) _mm512_loadu_si512(from)
#define STORE_32(to, x) _mm512_storeu_si512(to, x)
#define ADD_32(x, y) _mm512_add_epi16(x, y)
#define SUBTRACT_32(x, y) _mm512_sub_epi16(x, y)
#define SHIFT_32(x, places) _mm512_sll_epi16(x, _mm_cvtsi32_si128(places))
#define BYTES_32(from) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)(from)))
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
typedef int16x8_t vector_8;
#define ZEROS_8() vdupq_n_s16(0)
#define LOAD_8(from) vld1q_s16((const int16_t *)(const void *)(from))
#define STORE_8(to, x) vst1q_s16((int16_t *)(void *)(to), x)
#define SAME_8(x) vdupq_n_s16((int16_t)(x))
#define ADD_8(x, y) vaddq_s16(x, y)
#define SUBTRACT_8(x, y) vsubq_s16(x, y)
#define SHIFT_8(x, places) vshlq_s16(x, vdupq_n_s16((int16_t)(places)))
#define BYTES_8(from) vmovl_s8(vld1_s8(from))
#elif defined(__SSE2__) && !defined(__AVX2__)
#include <emmintrin.h>
typedef __m128i vector_8;
#define ZEROS_8() _mm_setzero_si128()
#define LOAD_8(from) _mm_loadu_si128((const __m128i *)(const void *)(from))
#define STORE_8(to, x) _mm_storeu_si128((__m128i *)(void *)(to), x)
#define SAME_8(x) _mm_set1_epi16((short)(x))
#define ADD_8(x, y) _mm_add_epi16(x, y)
#define SUBTRACT_8(x, y) _mm_sub_epi16(x, y)
#define SHIFT_8(x, places) _mm_sll_epi16(x, _mm_cvtsi32_si128(places))
#define BYTES_8(from) \
    _mm_srai_epi16(_mm_unpacklo_epi8(ZEROS_8(), _mm_loadl_epi64((const __m128i *)(const void *)(from))), 8)
#endif

#if defined(__GNUC__)
#define ALONE __attribute__((noinline, aligned(64))) /* times then do not depend on where it comes to lie */
#else
#define ALONE
#endif

/* Rows from `from` to `to` of their lists; list i begins at `first` [i], and the next one behind it. */
typedef struct {
    const int8_t *weight;
    const uint16_t *rows, *first;
    int32_t from, to, patterns, plane, width; /* a row of plane p counts 2^p */
} row_lists;

#ifdef VECTOR
/* The step that changes before a list. It begins there unless the bit above that of the step is set. */
static const uint8_t changing[PATTERNS] = {0, 0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0};

/* Rows are summed one after the other, and a step gets what that sum grew by while it lasted. So there is one addition
   for a row, and all that it is added to stays in registers: each is a function of its own for that. */
#if defined(__GNUC__) && !defined(__clang__)
#define FOR_COUNT _Pragma("GCC unroll 12") /* which -O2 does not do by itself */
#else
#define FOR_COUNT
#endif
#if defined(__GNUC__) && !defined(__clang__) && defined(__SSE2__)
#define HOLD(x) __asm__("" : "+v"(x)) /* in a register, where gcc leaves it in memory or moves it about otherwise */
#else
#define HOLD(x) (void)(x)
#endif
#define ADD_GROWTH(LANES, COUNT, PART, BEFORE)                                                                       \
    FOR_COUNT for (int32_t v = 0; v < COUNT; v++) {                                                                  \
        int16_t *at = PART + v * LANES;                                                                              \
        const vector_##LANES more = SHIFT_##LANES(SUBTRACT_##LANES(sum[v], BEFORE[v]), plane);                       \
        STORE_##LANES(at, ADD_##LANES(LOAD_##LANES(at), more));                                                      \
    }
#define ADD_LISTS(LANES, COUNT)                                                                                      \
    static ALONE void add_lists_##LANES##_##COUNT(const row_lists *lists, int32_t c, int16_t *part) {                \
        const int32_t width = lists->width, plane = lists->plane, to = lists->to, patterns = lists->patterns;        \
        const uint16_t *rows = lists->rows, *first = lists->first;                                                   \
        const int8_t *weight = lists->weight + c;                                                                    \
        int32_t i = lists->from, list = 1, last = 0;                                                                 \
        vector_##LANES sum[COUNT], before[GROUP][COUNT];                                                             \
        FOR_COUNT for (int32_t v = 0; v < COUNT; v++) sum[v] = before[0][v] = ZEROS_##LANES();                       \
        for (part += c;;) {                                                                                          \
            const int32_t end = smaller(first[list + 1], to);                                                        \
            for (; i < end; i++) {                                                                                   \
                const int8_t *row = weight + (size_t)rows[i] * (size_t)width;                                        \
                FOR_COUNT for (int32_t v = 0; v < COUNT; v++) {                                                      \
                    sum[v] = ADD_##LANES(sum[v], BYTES_##LANES(row + v * LANES));                                    \
                    HOLD(sum[v]);                                                                                    \
                }                                                                                                    \
            }                                                                                                        \
            if (++list == patterns) break;                                                                           \
            const int32_t step = changing[list];                                                                     \
            if ((list >> step) & 2)                                                                                  \
                ADD_GROWTH(LANES, COUNT, part + step * width, before[step])                                          \
            else                                                                                                     \
                FOR_COUNT for (int32_t v = 0; v < COUNT; v++) before[step][v] = sum[v];                              \
        }                                                                                                            \
        for (; list > 2; list >>= 1) last++; /* the step that ends */                                                \
        ADD_GROWTH(LANES, COUNT, part + last * width, before[last])                                                  \
    }
#define ADD_ALL_LISTS(LANES) \
    ADD_LISTS(LANES, 12)     \
    ADD_LISTS(LANES, 8)      \
    ADD_LISTS(LANES, 6)      \
    ADD_LISTS(LANES, 4)      \
    ADD_LISTS(LANES, 3)      \
    ADD_LISTS(LANES, 2)      \
    ADD_LISTS(LANES, 1)
#if VECTOR == 32
ADD_ALL_LISTS(32)
ADD_LISTS(16, 1)
#elif VECTOR == 16
ADD_ALL_LISTS(16)
#else
ADD_ALL_LISTS(8)
#endif
#if defined(__SSE2__) && !defined(__AVX2__)
#define MOST 8 /* vectors of sums: with more, -O2 leaves them in memory */
#else
#define MOST 12
#endif
#define JOINED(LANES, COUNT) add_lists_##LANES##_##COUNT
#define LISTS_OF(LANES, COUNT) JOINED(LANES, COUNT)
#define TRY_LISTS(COUNT) \
    if (COUNT <= MOST && left >= COUNT * VECTOR) return LISTS_OF(VECTOR, COUNT)(lists, c, part), COUNT * VECTOR;

/* From channel `c` on; returns how many were done. */
static int32_t add_some(const row_lists *lists, int32_t c, int16_t *part) {
    const int32_t left = lists->width - c;
    TRY_LISTS(12)
    TRY_LISTS(8)
    TRY_LISTS(6)
    TRY_LISTS(4)
    TRY_LISTS(3)
    TRY_LISTS(2)
    TRY_LISTS(1)
    return LISTS_OF(LEAST, 1)(lists, c, part), LEAST;
}

static void add_lists(const row_lists *lists, int16_t *part) {
    for (int32_t c = 0; c < lists->width;) c += add_some(lists, c, part);
}

/* sums = start + what `part` holds of a step */
static void take_apart(const int16_t *part, const int32_t *start, int32_t *sums, int32_t width) {
    if (start == sums)
        for (int32_t c = 0; c < width; c++) sums[c] += part[c];
    else
        for (int32_t c = 0; c < width; c++) sums[c] = start[c] + part[c];
}
#else
/* A word takes the sums of several channels, 16 bits each, as one number: even sums, s0 + 2^16 s2 + ..., and others
   from the bytes above the first, s1 + 2^8 s2 + 2^16 s3 + ... A row adds its bytes + 128, so that they have no signs;
   the sums begin that much lower. All of it is taken apart in `flush`. */
typedef uintptr_t word;
#define ONES ((word)-1 / 0xffff) /* a one in every 16 bits */
#define FLIP (ONES * 0x8080)
#if UINTPTR_MAX > UINT32_MAX
#define EACH_WORD(DO) DO(0) DO(1)
#else
#define EACH_WORD(DO) DO(0) DO(1) DO(2) DO(3)
#endif
#define BEGIN(v) word even##v = (word)0 - ONES * 0x80 * count, more##v = (word)0 - (FLIP >> 8) * count;
#define ADD_ROW(v)                                        \
    memcpy(&bytes, row + v * sizeof(word), sizeof(word)); \
    bytes ^= FLIP;                                        \
    even##v += bytes & (ONES * 0xff);                     \
    more##v += bytes >> 8;
#define SHIFT(v) even##v <<= plane, more##v <<= plane;
#define ADD_STEP(v) to[2 * v] += even##v, to[2 * v + 1] += more##v;

/* LRFDYN_LANES channels of a list: one sum in registers, then added to all of its steps. */
static void add_list(const int8_t *weight, int32_t width, const uint16_t *event, const uint16_t *end, int32_t pattern,
                     int32_t plane, int16_t *part) {
    const word count = (word)(end - event);
    word bytes;
    EACH_WORD(BEGIN)
    for (; event < end; event++) {
        const int8_t *row = weight + (size_t)*event * (size_t)width;
        EACH_WORD(ADD_ROW)
    }
    if (plane) {
        EACH_WORD(SHIFT)
    }
    for (; pattern; pattern >>= 1, part += width) {
        word *to = (word *)(void *)part;
        if (pattern & 1) {
            EACH_WORD(ADD_STEP)
        }
    }
}

static void add_lists(const row_lists *lists, int16_t *part) {
    const int32_t width = lists->width;
    int32_t i = lists->from;
    for (int32_t list = 1; list < lists->patterns; list++) {
        const int32_t end = smaller(lists->first[list + 1], lists->to);
        if (i >= end) continue;
        for (int32_t c = 0; c < width; c += LRFDYN_LANES)
            add_list(lists->weight + c, width, lists->rows + i, lists->rows + end, list ^ (list >> 1), lists->plane,
                     part + c);
        i = end;
    }
}

/* What is left of a word without its lowest sum. */
static word above(word sums) { return (word)((intptr_t)(sums + 0x8000) >> 16); }

/* sums = start + what `part` holds of a step */
static void take_apart(const int16_t *words, const int32_t *start, int32_t *sums, int32_t width) {
    const word *part = (const word *)(const void *)words;
    for (const int32_t *end = start + width; start < end; part += 2) {
        word even = part[0], odd = part[1] - above(even) * 256;
        for (size_t i = 0; i < sizeof(word); i += 2, even = above(even), odd = above(odd)) {
            *sums++ = *start++ + (int16_t)even;
            *sums++ = *start++ + (int16_t)odd;
        }
    }
}
#endif

#endif

#include "lrfdyn_kernels.h"

#include <string.h>

#define GROUP 4                /* time steps whose spikes are sorted together */
#define PATTERNS (1 << GROUP)  /* at most: in which of them a channel fires */
#define COPIED 16              /* events that are copied at once */
#define SPARE 32               /* places behind lists that may be written, too */
#define MOST_TAPS 64

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

/* ---- shares ---------------------------------------------------------------------------------------------------- */

/* Of `count` pieces of work, the first of this share, and the one behind its last. */
static int32_t first_of(lrfdyn_share share, int32_t count) {
    const int32_t more = count % share.parts; /* parts that have one piece more than others */
    return count / share.parts * share.part + (share.part < more ? share.part : more);
}

static int32_t end_of(lrfdyn_share share, int32_t count) {
    share.part++;
    return first_of(share, count);
}

/* ---- maps ---------------------------------------------------------------------------------------------------- */

static int32_t padded(int32_t channels) { return (channels + LRFDYN_LANES - 1) / LRFDYN_LANES * LRFDYN_LANES; }

static int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

/* Where the channels of a pixel lie at a step; of spikes, those of a plane at all steps. */
static const uint8_t *spikes_at(const lrfdyn_map *map, int32_t pixel, int32_t plane) {
    return (const uint8_t *)map->data + ((size_t)pixel * map->planes + (size_t)plane) * (size_t)map->channels;
}

static size_t integers_at(const lrfdyn_map *map, int32_t pixel, int32_t step) {
    return ((size_t)pixel * (size_t)map->steps + (size_t)step) * (size_t)map->channels;
}

/* The integers of all channels of a pixel at a step. */
static void load_row(const lrfdyn_map *map, int32_t pixel, int32_t step, int32_t *row) {
    const int32_t channels = map->channels;
    step = smaller(step, map->steps - 1);
    if (map->kind == LRFDYN_SPIKES) {
        const uint8_t *bits = spikes_at(map, pixel, 0);
        for (int32_t c = 0; c < channels; c++) row[c] = (bits[c] >> step) & 1;
        for (int32_t plane = 1; plane < map->planes; plane++) {
            bits += channels;
            for (int32_t c = 0; c < channels; c++) row[c] += ((bits[c] >> step) & 1) << plane;
        }
    } else if (map->kind == LRFDYN_INT16) {
        const int16_t *from = (const int16_t *)map->data + integers_at(map, pixel, step);
        for (int32_t c = 0; c < channels; c++) row[c] = from[c];
    } else if (map->kind == LRFDYN_INT32) {
        memcpy(row, (const int32_t *)map->data + integers_at(map, pixel, step), (size_t)channels * sizeof(int32_t));
    } else {
        const uint8_t *from = (const uint8_t *)map->data + pixel;
        const size_t pixels = (size_t)map->height * (size_t)map->width;
        for (int32_t c = 0; c < channels; c++) row[c] = from[(size_t)c * pixels];
    }
}

/* The channels from `first` to `end`. Steps are stored from the first to the last: the first clears what spikes held. */
static void store_channels(const lrfdyn_map *map, int32_t pixel, int32_t step, const int32_t *row, int32_t first,
                           int32_t end) {
    if (map->kind == LRFDYN_SPIKES) {
        uint8_t *bits = (uint8_t *)map->data + (size_t)pixel * map->planes * (size_t)map->channels;
        for (int32_t plane = 0; plane < map->planes; plane++, bits += map->channels)
            for (int32_t c = first; c < end; c++)
                bits[c] = (uint8_t)((step ? bits[c] : 0) | (((row[c] >> plane) & 1) << step));
    } else if (map->kind == LRFDYN_INT16) {
        int16_t *to = (int16_t *)map->data + integers_at(map, pixel, step);
        for (int32_t c = first; c < end; c++) to[c] = (int16_t)row[c];
    } else {
        int32_t *to = (int32_t *)map->data + integers_at(map, pixel, step);
        for (int32_t c = first; c < end; c++) to[c] = row[c];
    }
}

static void store_row(const lrfdyn_map *map, int32_t pixel, int32_t step, const int32_t *row) {
    store_channels(map, pixel, step, row, 0, map->channels);
}

static void add_row(int32_t *restrict sums, const int32_t *restrict row, int32_t channels) {
    for (int32_t c = 0; c < channels; c++) sums[c] += row[c];
}

/* The same, spread over `channels` channels and all pixels. */
static void load_spread(const lrfdyn_map *map, int32_t pixel, int32_t step, int32_t channels, int32_t *row) {
    const int32_t each = channels / map->channels;
    load_row(map, map->height * map->width == 1 ? 0 : pixel, step, row);
    if (each > 1)
        for (int32_t c = channels; c-- > 0;) row[c] = row[c / each];
}

/* ---- convolutions of spikes ----------------------------------------------------------------------------------- */

/* The channels of a pixel that fire are sorted by the pattern of time steps in which they do: what the channels of one
   pattern add is summed once, however many steps share it. There is a list for every plane, group of steps and pattern;
   `first` says where it begins, and the next `first` where it ends. Patterns are in the order of a Gray code, in which
   neighbours differ in one step; that of no steps comes first, and its list is empty. */
static int32_t groups_of(const lrfdyn_map *in) { return (in->steps + GROUP - 1) / GROUP; }

static int32_t patterns_of(const lrfdyn_map *in) { return 1 << smaller(in->steps, GROUP); }

static int32_t lists_of(const lrfdyn_map *in) { return in->planes * groups_of(in) * patterns_of(in); }

/* The channels with a spike in the group of steps behind `shift`, in order; returns how many. */
static int32_t find_events(const uint8_t *bits, int32_t channels, int32_t shift, uint16_t *found) {
    int32_t count = 0, c = 0;
    for (; c + 8 <= channels; c += 8) {
        uint64_t word;
        memcpy(&word, bits + c, 8);
        if (word == 0) continue;
        for (int32_t i = c; i < c + 8; i++) { /* without a branch that depends on the spike */
            found[count] = (uint16_t)i;
            count += ((bits[i] >> shift) & (PATTERNS - 1)) != 0;
        }
    }
    for (; c < channels; c++) {
        found[count] = (uint16_t)c;
        count += ((bits[c] >> shift) & (PATTERNS - 1)) != 0;
    }
    return count;
}

/* Sorts the events of a plane and a group of steps, which begin at `total`; returns where they end. `found` has SPARE
   places more than there are channels. */
static int32_t sort_group(const uint8_t *bits, int32_t channels, int32_t shift, int32_t patterns, int32_t total,
                          uint16_t *found, uint16_t *events, uint16_t *first) {
    const int32_t count = find_events(bits, channels, shift, found);
    int32_t place[PATTERNS] = {0};
    if (patterns == 2) { /* there is one, and what was found is sorted */
        memcpy(events + total, found, (size_t)count * sizeof(uint16_t));
        first[0] = first[1] = (uint16_t)total;
        return total + count;
    }
    for (int32_t i = 0; i < count; i++) place[(bits[found[i]] >> shift) & (PATTERNS - 1)]++;
    for (int32_t list = 0; list < patterns; list++) {
        const int32_t pattern = list ^ (list >> 1), length = place[pattern];
        first[list] = (uint16_t)total;
        place[pattern] = total;
        total += length;
    }
    for (int32_t i = 0; i < count; i++) events[place[(bits[found[i]] >> shift) & (PATTERNS - 1)]++] = found[i];
    return total;
}

#if defined(__AVX512VBMI2__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define PACKED 4096 /* channels at most: their number and a pattern share 16 bits */

/* The same without branches that depend on spikes: what fired moves together, and then what has the same pattern. */
static int32_t sort_packed(const uint8_t *bits, int32_t channels, int32_t shift, int32_t patterns, int32_t total,
                           uint16_t *found, uint16_t *events, uint16_t *first) {
    const __m512i group = _mm512_set1_epi16(PATTERNS - 1), number = _mm512_set1_epi16(PACKED - 1);
    const __m512i step = _mm512_set1_epi16(32);
    __m512i index = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11,
                                     10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int32_t count = 0;
    for (int32_t c = 0; c < channels; c += 32, index = _mm512_add_epi16(index, step)) {
        const __mmask32 inside = channels - c < 32 ? (UINT32_C(1) << (channels - c)) - 1 : ~UINT32_C(0);
        const __m512i wide = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(inside, bits + c));
        const __m512i fired = _mm512_and_si512(_mm512_srl_epi16(wide, _mm_cvtsi32_si128(shift)), group);
        const __mmask32 any = _mm512_test_epi16_mask(fired, fired);
        const __m512i both = _mm512_or_si512(_mm512_slli_epi16(fired, 12), index);
        _mm512_storeu_si512(found + count, _mm512_maskz_compress_epi16(any, both));
        count += _mm_popcnt_u32(any);
    }
    first[0] = (uint16_t)total;
    for (int32_t list = 1; list < patterns; list++) {
        const __m512i pattern = _mm512_set1_epi16((short)(list ^ (list >> 1)));
        first[list] = (uint16_t)total;
        for (int32_t i = 0; i < count; i += 32) {
            const __m512i both = _mm512_loadu_si512(found + i);
            const __mmask32 inside = count - i < 32 ? (UINT32_C(1) << (count - i)) - 1 : ~UINT32_C(0);
            const __mmask32 same = _mm512_mask_cmpeq_epi16_mask(inside, _mm512_srli_epi16(both, 12), pattern);
            const int32_t length = _mm_popcnt_u32(same);
            const __m512i channel = _mm512_maskz_compress_epi16(same, _mm512_and_si512(both, number));
            const __mmask32 taken = (__mmask32)((UINT64_C(1) << length) - 1); /* others may lie behind them */
            _mm512_mask_storeu_epi16(events + total, taken, channel);
            total += length;
        }
    }
    return total;
}
#endif

static void sort_events(const lrfdyn_map *in, int32_t pixel, uint16_t *found, uint16_t *events, uint16_t *first) {
    const int32_t groups = groups_of(in), patterns = patterns_of(in), channels = in->channels;
    int32_t total = 0;
    for (int32_t plane = 0; plane < in->planes; plane++) {
        const uint8_t *bits = spikes_at(in, pixel, plane);
        for (int32_t shift = 0; shift < groups * GROUP; shift += GROUP, first += patterns) {
#ifdef PACKED
            if (channels <= PACKED) {
                total = sort_packed(bits, channels, shift, patterns, total, found, events, first);
                continue;
            }
#endif
            total = sort_group(bits, channels, shift, patterns, total, found, events, first);
        }
    }
    first[0] = (uint16_t)total; /* behind the last list */
}

/* Events of a plane and a group of steps, from `from` to `to` of their lists, and the rows of weights that they add. */
typedef struct {
    const int8_t *weight;
    const uint16_t *events, *first;
    int32_t from, to, patterns, plane, width;
} event_lists;

/* Adds the lists to `part` [step][width], in 16 bits. */
#ifdef VECTOR
/* The step that changes before a list. It begins there unless the bit above that of the step is set. */
static const uint8_t changing[PATTERNS] = {0, 0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0};

/* Rows are summed one after the other, and a step gets what that sum grew by while it lasted. So there is one addition
   for a list, and all that the rows are added to stays in registers. */
#if defined(__GNUC__) && !defined(__clang__)
#define FOR_COUNT _Pragma("GCC unroll 12") /* which -O2 does not do by itself */
#else
#define FOR_COUNT
#endif
#define ADD_LISTS(LANES, COUNT)                                                                                      \
    static void add_lists_##LANES##_##COUNT(const event_lists *lists, int32_t c, int16_t *part) {                    \
        const int32_t width = lists->width, plane = lists->plane, to = lists->to, patterns = lists->patterns;        \
        const uint16_t *events = lists->events, *first = lists->first;                                               \
        const int8_t *weight = lists->weight + c;                                                                    \
        int32_t i = lists->from, list = 1;                                                                           \
        vector_##LANES sum[COUNT];                                                                                   \
        FOR_COUNT for (int32_t v = 0; v < COUNT; v++) sum[v] = ZEROS_##LANES();                                      \
        for (part += c;;) {                                                                                          \
            const int32_t end = smaller(first[list + 1], to);                                                        \
            for (; i < end; i++) {                                                                                   \
                const int8_t *row = weight + (size_t)events[i] * (size_t)width;                                      \
                FOR_COUNT for (int32_t v = 0; v < COUNT; v++)                                                        \
                    sum[v] = ADD_##LANES(sum[v], BYTES_##LANES(row + v * LANES));                                    \
            }                                                                                                        \
            if (++list == patterns) break;                                                                           \
            const int32_t step = changing[list];                                                                     \
            int16_t *at = part + step * width;                                                                       \
            if ((list >> step) & 2)                                                                                  \
                FOR_COUNT for (int32_t v = 0; v < COUNT; v++, at += LANES)                                           \
                    STORE_##LANES(at, ADD_##LANES(LOAD_##LANES(at), SHIFT_##LANES(sum[v], plane)));                  \
            else                                                                                                     \
                FOR_COUNT for (int32_t v = 0; v < COUNT; v++, at += LANES)                                           \
                    STORE_##LANES(at, SUBTRACT_##LANES(LOAD_##LANES(at), SHIFT_##LANES(sum[v], plane)));             \
        }                                                                                                            \
        for (; list > 2; list >>= 1) part += width; /* the last step ends */                                         \
        FOR_COUNT for (int32_t v = 0; v < COUNT; v++, part += LANES)                                                 \
            STORE_##LANES(part, ADD_##LANES(LOAD_##LANES(part), SHIFT_##LANES(sum[v], plane)));                      \
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
static int32_t add_some(const event_lists *lists, int32_t c, int16_t *part) {
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

static void add_lists(const event_lists *lists, int16_t *part) {
    for (int32_t c = 0; c < lists->width;) c += add_some(lists, c, part);
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

static void add_lists(const event_lists *lists, int16_t *part) {
    const int32_t width = lists->width;
    int32_t i = lists->from;
    for (int32_t list = 1; list < lists->patterns; list++) {
        const int32_t end = smaller(lists->first[list + 1], lists->to);
        if (i >= end) continue;
        for (int32_t c = 0; c < width; c += LRFDYN_LANES)
            add_list(lists->weight + c, width, lists->events + i, lists->events + end, list ^ (list >> 1), lists->plane,
                     part + c);
        i = end;
    }
}
#endif

/* Sums of one group of steps, in 16 bits as long as they surely fit, then added to those of 32 bits. */
typedef struct {
    int16_t *part;        /* [GROUP][padded channels]: zeros where nothing is `used` */
    int32_t *sums;        /* [steps][padded channels] */
    const int32_t *start; /* [padded channels]: holds instead of the sums until there are any */
    int32_t width, used, limit;
    int32_t from, to, repeated; /* the steps of the sums; whether the first one's hold for all */
    int32_t summed;             /* whether there are sums of these steps */
} accumulator;

#ifndef VECTOR
/* What is left of a word without its lowest sum. */
static word above(word sums) { return (word)((intptr_t)(sums + 0x8000) >> 16); }

/* sums = start + what the words hold */
static void take_apart(const word *part, const int32_t *start, int32_t *sums, int32_t width) {
    for (const int32_t *end = start + width; start < end; part += 2) {
        word even = part[0], odd = part[1] - above(even) * 256;
        for (size_t i = 0; i < sizeof(word); i += 2, even = above(even), odd = above(odd)) {
            *sums++ = *start++ + (int16_t)even;
            *sums++ = *start++ + (int16_t)odd;
        }
    }
}
#endif

static void flush(accumulator *a) {
    const int32_t width = a->width;
    for (int32_t step = a->from; step < a->to; step++) {
        const int16_t *restrict part = a->part + (a->repeated ? 0 : step - a->from) * width;
        int32_t *restrict sums = a->sums + step * width;
#ifndef VECTOR
        take_apart((const word *)(const void *)part, a->summed ? sums : a->start, sums, width);
#else
        if (a->summed)
            for (int32_t c = 0; c < width; c++) sums[c] += part[c];
        else
            for (int32_t c = 0; c < width; c++) sums[c] = a->start[c] + part[c];
#endif
    }
    if (a->used) memset(a->part, 0, (size_t)(GROUP * width) * sizeof(int16_t));
    a->used = 0;
    a->summed = 1;
}

static void add_events(accumulator *a, event_lists *lists, int32_t end) {
    const int32_t plane = lists->plane;
    for (; lists->from < end; lists->from = lists->to) {
        lists->to = smaller(end, lists->from + (a->limit >> plane));
        const int32_t more = (lists->to - lists->from) << plane;
        if (a->used + more > a->limit) flush(a);
        a->used += more;
        add_lists(lists, a->part);
    }
}

/* What a convolution of spikes holds while it goes through a picture: the sorted events of the rows that it sees. */
typedef struct {
    uint16_t *events, *first, *merged;
    int16_t *part;
    int32_t rows, sorted; /* held rows, and where those of the picture begin that are not sorted yet */
} conv_state;

static size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* `row` is the first of the output that is computed. */
static uint8_t *open_conv(conv_state *state, const lrfdyn_term *term, int32_t row, int32_t width, uint8_t *memory) {
    const lrfdyn_map *in = term->in;
    const int32_t top = row * term->stride - term->padding;
    const size_t lists = (size_t)lists_of(in), events = (size_t)(in->planes * groups_of(in) * in->channels);
    state->rows = (term->kernel_height - 1) * term->dilation + 1;
    state->sorted = top > 0 ? top : 0;
    const size_t pixels = (size_t)state->rows * (size_t)in->width;
    const size_t taps = (size_t)term->kernel_height * (size_t)term->kernel_width;
    state->events = (uint16_t *)(void *)memory;
    memory += round_up((pixels * events + SPARE) * sizeof(uint16_t));
    state->first = (uint16_t *)(void *)memory;
    memory += round_up(pixels * (lists + 1) * sizeof(uint16_t));
    state->merged = (uint16_t *)(void *)memory;
    memory += round_up((taps * (size_t)in->channels + SPARE) * sizeof(uint16_t));
    state->part = (int16_t *)(void *)memory;
    memset(state->part, 0, (size_t)(GROUP * width) * sizeof(int16_t));
    return memory + round_up((size_t)(GROUP * width) * sizeof(int16_t));
}

/* The sorted events of a tap, and its first row of weights. */
typedef struct {
    const uint16_t *events, *first;
    uint16_t row;
} tap_events;

/* The lists of all taps as one. Most are short: COPIED events at a time need no branch that depends on their number. */
static void merge_lists(const tap_events *taps, int32_t count, int32_t list, int32_t patterns, uint16_t *merged,
                        uint16_t *first) {
    uint16_t *to = merged;
    for (int32_t end = list + patterns; list < end; list++, first++) {
        *first = (uint16_t)(to - merged);
        if (list == end - patterns) continue; /* that of no steps */
        for (int32_t tap = 0; tap < count; tap++) {
            const uint16_t *events = taps[tap].events + taps[tap].first[list], row = taps[tap].row;
            int32_t left = taps[tap].first[list + 1] - taps[tap].first[list];
#ifdef VECTOR
            for (;; events += COPIED, left -= COPIED) {
#if defined(__AVX2__)
                STORE_16(to, ADD_16(LOAD_16(events), _mm256_set1_epi16((short)row)));
#else
                STORE_8(to, ADD_8(LOAD_8(events), SAME_8(row)));
                STORE_8(to + 8, ADD_8(LOAD_8(events + 8), SAME_8(row)));
#endif
                to += smaller(left, COPIED);
                if (left <= COPIED) break;
            }
#else /* no more than there are */
            for (; left > 0; left--) *to++ = (uint16_t)(*events++ + row);
#endif
        }
    }
    *first = (uint16_t)(to - merged);
}

/* The sums of a pixel; where there is one group of steps, some may be left in `a`. */
static void convolve(const lrfdyn_term *term, conv_state *state, int32_t y, int32_t x, int32_t steps, accumulator *a) {
    const lrfdyn_map *in = term->in;
    const int32_t groups = groups_of(in), patterns = patterns_of(in), lists = lists_of(in);
    const int32_t each = in->planes * groups * in->channels;
    const int32_t top = y * term->stride - term->padding, left = x * term->stride - term->padding;
    const int32_t below = smaller(top + state->rows, in->height);
    for (; state->sorted < below; state->sorted++)
        for (int32_t column = 0; column < in->width; column++) {
            const int32_t slot = state->sorted % state->rows * in->width + column;
            sort_events(in, state->sorted * in->width + column, state->merged,
                        state->events + (size_t)slot * (size_t)each, state->first + (size_t)slot * (size_t)(lists + 1));
        }
    tap_events taps[MOST_TAPS];
    int32_t count = 0;
    for (int32_t i = 0; i < term->kernel_height; i++) {
        const int32_t row = top + i * term->dilation;
        if (row < 0 || row >= in->height) continue;
        for (int32_t j = 0; j < term->kernel_width; j++) {
            const int32_t column = left + j * term->dilation;
            if (column < 0 || column >= in->width) continue;
            const size_t slot = (size_t)(row % state->rows * in->width + column);
            taps[count].events = state->events + slot * (size_t)each;
            taps[count].first = state->first + slot * (size_t)(lists + 1);
            taps[count++].row = (uint16_t)((i * term->kernel_width + j) * in->channels);
        }
    }
    event_lists some = {(const int8_t *)term->weight, state->merged, 0, 0, 0, patterns, 0, a->width};
    for (int32_t group = 0; group < groups; group++) {
        if (group) flush(a);
        a->from = group * GROUP;
        a->to = a->repeated ? steps : smaller(a->from + GROUP, steps);
        a->summed = 0;
        for (some.plane = 0; some.plane < in->planes; some.plane++) {
            const int32_t list = (some.plane * groups + group) * patterns;
            uint16_t first[PATTERNS + 1];
            if (count == 1 && taps[0].row == 0) {
                some.events = taps[0].events;
                some.first = taps[0].first + list;
            } else {
                merge_lists(taps, count, list, patterns, state->merged, first);
                some.first = first;
            }
            some.from = some.first[0];
            add_events(a, &some, some.first[patterns]);
        }
    }
}

/* ---- other terms ---------------------------------------------------------------------------------------------- */

/* Of LRFDYN_LANES outputs: sums[o] += sum_i x[i] weight[i][o]. Elsewhere, four rows at a time are what compilers make
   vectors of. */
#if defined(__AVX512BW__)
#define WIDE_int8_t(from) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(from)))
#define WIDE_int16_t(from) _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(from)))
#define DENSE_LANES(TYPE)                                                                                            \
    __m512i sum = _mm512_loadu_si512(sums);                                                                          \
    const TYPE *own = weight;                                                                                        \
    for (int32_t i = 0; i < count; i++, own += width)                                                                \
        sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(_mm512_set1_epi32(x[i]), WIDE_##TYPE(own)));                  \
    _mm512_storeu_si512(sums, sum);
#else
#define DENSE_LANES(TYPE)                                                                                            \
    int32_t i = 0;                                                                                                   \
    for (; i + 4 <= count; i += 4) {                                                                                 \
        const int32_t p = x[i], q = x[i + 1], r = x[i + 2], s = x[i + 3];                                            \
        const TYPE *a = weight + (size_t)(i * width), *b = a + width, *c = b + width, *d = c + width;                \
        for (int32_t o = 0; o < LRFDYN_LANES; o++) sums[o] += p * a[o] + q * b[o] + r * c[o] + s * d[o];             \
    }                                                                                                                \
    for (; i < count; i++)                                                                                           \
        for (int32_t o = 0; o < LRFDYN_LANES; o++) sums[o] += x[i] * weight[(size_t)(i * width + o)];
#endif

/* The same for all o < outputs, where rows of weights are `width` apart. */
#define ADD_DENSE(NAME, TYPE)                                                                                        \
    static void NAME(int32_t *restrict sums, const int32_t *restrict x, int32_t count, const TYPE *restrict weight,  \
                     int32_t width, int32_t outputs) {                                                               \
        for (; outputs >= LRFDYN_LANES; outputs -= LRFDYN_LANES, sums += LRFDYN_LANES, weight += LRFDYN_LANES) {     \
            DENSE_LANES(TYPE)                                                                                        \
        }                                                                                                            \
        for (int32_t o = 0; o < outputs; o++)                                                                        \
            for (int32_t i = 0; i < count; i++) sums[o] += x[i] * weight[(size_t)(i * width + o)];                   \
    }
ADD_DENSE(add_dense_8, int8_t)
ADD_DENSE(add_dense_16, int16_t)

/* `row` holds the inputs of all taps, [tap][channel]. */
static void dense(const lrfdyn_term *term, int32_t y, int32_t x, int32_t step, int32_t channels, int32_t width,
                  int32_t *sums, int32_t *row) {
    const lrfdyn_map *in = term->in;
    const int32_t taps = term->kernel_height * term->kernel_width, groups = term->groups;
    const int32_t inside = in->channels / groups, outputs = channels / groups;
    const size_t pixels = (size_t)in->height * (size_t)in->width;
    for (int32_t tap = 0; tap < taps; tap++) {
        const int32_t v = y * term->stride - term->padding + tap / term->kernel_width * term->dilation;
        const int32_t u = x * term->stride - term->padding + tap % term->kernel_width * term->dilation;
        int32_t *to = row + tap * in->channels;
        if (v >= 0 && v < in->height && u >= 0 && u < in->width) {
            if (in->kind == LRFDYN_PIXELS) {
                const uint8_t *from = (const uint8_t *)in->data + v * in->width + u;
                for (int32_t c = 0; c < in->channels; c++) to[c] = from[(size_t)c * pixels];
            } else {
                load_row(in, v * in->width + u, step, to);
            }
        } else
            for (int32_t c = 0; c < in->channels; c++) to[c] = term->border ? term->border[c] : 0;
    }
    /* Without groups the inputs of all taps lie as the weights do. */
    const int32_t pieces = groups == 1 ? 1 : taps, count = groups == 1 ? taps * inside : inside;
    for (int32_t group = 0; group < groups; group++)
        for (int32_t piece = 0; piece < pieces; piece++) {
            const int32_t *from = row + piece * in->channels + group * inside;
            int32_t *to = sums + group * outputs;
            const size_t at = (size_t)(piece * inside * width + group * outputs);
            if (term->wide)
                add_dense_16(to, from, count, (const int16_t *)term->weight + at, width, outputs);
            else
                add_dense_8(to, from, count, (const int8_t *)term->weight + at, width, outputs);
        }
}

static void add_products_16(int32_t *restrict sums, const int16_t *restrict x, const int16_t *restrict weight,
                            int32_t channels) {
    for (int32_t c = 0; c < channels; c++) sums[c] += x[c] * weight[c];
}

static void add_products_32(int32_t *restrict sums, const int32_t *restrict x, const int16_t *restrict weight,
                            int32_t channels) {
    for (int32_t c = 0; c < channels; c++) sums[c] += x[c] * weight[c];
}

#if defined(__AVX512VL__) && defined(__AVX512BW__)
/* A stencil of spikes: the weights of those that fired are added, 16 channels at once in a register for all taps. */
static void stencil_of_spikes(const lrfdyn_term *term, int32_t y, int32_t x, int32_t step, int32_t *sums) {
    const lrfdyn_map *in = term->in;
    const int32_t channels = in->channels;
    const __m128i bit = _mm_set1_epi8((char)(1 << smaller(step, in->steps - 1)));
    for (int32_t c = 0; c < channels; c += 16) {
        const __mmask16 inside = (__mmask16)((1u << smaller(channels - c, 16)) - 1);
        const int16_t *weight = (const int16_t *)term->weight + c;
        __m512i sum = _mm512_maskz_loadu_epi32(inside, sums + c);
        for (int32_t i = 0; i < term->kernel_height; i++)
            for (int32_t j = 0; j < term->kernel_width; j++, weight += channels) {
                const int32_t v = y * term->stride - term->padding + i * term->dilation;
                const int32_t u = x * term->stride - term->padding + j * term->dilation;
                if (v < 0 || v >= in->height || u < 0 || u >= in->width) continue;
                const uint8_t *bits = spikes_at(in, v * in->width + u, 0) + c;
                __m512i unit = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(inside, weight));
                for (int32_t plane = 0; plane < in->planes; plane++, bits += channels) {
                    const __mmask16 fired = _mm_test_epi8_mask(_mm_maskz_loadu_epi8(inside, bits), bit);
                    sum = _mm512_mask_add_epi32(sum, fired, sum, unit);
                    unit = _mm512_add_epi32(unit, unit);
                }
            }
        _mm512_mask_storeu_epi32(sums + c, inside, sum);
    }
}
#endif

static void stencil(const lrfdyn_term *term, int32_t y, int32_t x, int32_t step, int32_t *sums, int32_t *row) {
    const lrfdyn_map *in = term->in;
    const int32_t channels = in->channels;
#if defined(__AVX512VL__) && defined(__AVX512BW__)
    if (in->kind == LRFDYN_SPIKES) {
        stencil_of_spikes(term, y, x, step, sums);
        return;
    }
#endif
    const int16_t *weight = (const int16_t *)term->weight;
    for (int32_t i = 0; i < term->kernel_height; i++)
        for (int32_t j = 0; j < term->kernel_width; j++, weight += channels) {
            const int32_t v = y * term->stride - term->padding + i * term->dilation;
            const int32_t u = x * term->stride - term->padding + j * term->dilation;
            if (v < 0 || v >= in->height || u < 0 || u >= in->width) continue;
            const int32_t pixel = v * in->width + u;
            if (in->kind == LRFDYN_INT16) {
                const size_t at = integers_at(in, pixel, smaller(step, in->steps - 1));
                add_products_16(sums, (const int16_t *)in->data + at, weight, channels);
            } else {
                load_row(in, pixel, step, row);
                add_products_32(sums, row, weight, channels);
            }
        }
}

static int32_t rescaled(int32_t value, int32_t multiplier, int32_t shift, int32_t limit) {
    const int64_t half = ((int64_t)1 << shift) >> 1;
    const int64_t result = ((int64_t)value * multiplier + half) >> shift;
    return result > limit ? limit : result < -limit ? -limit : (int32_t)result;
}

static void apply(const lrfdyn_term *term, int32_t y, int32_t x, int32_t step, const lrfdyn_map *out, int32_t width,
                  int32_t *sums, int32_t *row) {
    const int32_t channels = out->channels, *multiplier = (const int32_t *)term->weight;
    switch (term->kind) {
        case LRFDYN_DENSE: dense(term, y, x, step, channels, width, sums, row); break;
        case LRFDYN_STENCIL: stencil(term, y, x, step, sums, row); break;
        case LRFDYN_ADD:
            load_spread(term->in, y * out->width + x, step, channels, row);
            add_row(sums, row, channels);
            break;
        case LRFDYN_TIMES:
            load_spread(term->in, y * out->width + x, step, channels, row);
            for (int32_t c = 0; c < channels; c++) sums[c] *= row[c];
            break;
        case LRFDYN_MULTIPLY:
            for (int32_t c = 0; c < channels; c++) sums[c] *= multiplier[c];
            break;
        case LRFDYN_RESCALE:
            for (int32_t c = 0; c < channels; c++)
                sums[c] = rescaled(sums[c], multiplier[c], term->extra[c], term->limit);
            return; /* its extra are shifts */
        default: break;
    }
    if (term->extra) add_row(sums, term->extra, channels);
}

/* ---- stages --------------------------------------------------------------------------------------------------- */

#define BLOCK 16 /* neurons at once */

/* What goes into the neurons of a pixel: `sums` [step], `stride` apart, and in 16 bits `part` [step], or 0. */
typedef struct {
    const int32_t *sums;
    const int16_t *part;
    int32_t steps, stride, width;
} currents;

#if defined(VECTOR) && VECTOR == 32
#define FIRES_PARTS /* otherwise they are added to the sums before */
/* Two blocks at once, of which one need not wait for the other. */
static void fire_blocks(const lrfdyn_stage *stage, const currents *in, int32_t first, uint8_t *spikes) {
    const __m128i shift = _mm_cvtsi32_si128(stage->shift), fraction = _mm_cvtsi32_si128(stage->fraction);
    const int32_t *sums = in->sums + first, steps = stage->out->steps, left = stage->out->channels - first;
    const int16_t *part = in->part ? in->part + first : 0;
    const uint32_t all = left < 2 * BLOCK ? (UINT32_C(1) << left) - 1 : ~UINT32_C(0);
    const __mmask16 inside[2] = {(__mmask16)all, (__mmask16)(all >> BLOCK)};
    __m512i least[2], membrane[2], fired[2], bit = _mm512_set1_epi32(1);
    for (int32_t b = 0; b < 2; b++) {
        least[b] = _mm512_maskz_loadu_epi32(inside[b], stage->threshold + first + b * BLOCK);
        membrane[b] = fired[b] = _mm512_setzero_si512();
    }
    for (int32_t step = 0; step < steps; step++) {
        const __m512i more = part ? _mm512_maskz_loadu_epi16(all, part) : _mm512_setzero_si512();
        const __m512i wide[2] = {_mm512_cvtepi16_epi32(_mm512_castsi512_si256(more)),
                                 _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(more, 1))};
        for (int32_t b = 0; b < 2; b++) {
            const __m512i sum = _mm512_add_epi32(_mm512_maskz_loadu_epi32(inside[b], sums + b * BLOCK), wide[b]);
            membrane[b] = _mm512_add_epi32(_mm512_sra_epi32(membrane[b], shift), _mm512_sll_epi32(sum, fraction));
            const __mmask16 silent = _mm512_cmplt_epi32_mask(membrane[b], least[b]);
            membrane[b] = _mm512_maskz_mov_epi32(silent, membrane[b]);
            fired[b] = _mm512_mask_or_epi32(fired[b], (__mmask16)~silent, fired[b], bit);
        }
        bit = _mm512_add_epi32(bit, bit);
        if (step + 1 >= in->steps) continue;
        sums += in->stride;
        if (part) part += in->width;
    }
    for (int32_t b = 0; b < 2; b++) _mm512_mask_cvtepi32_storeu_epi8(spikes + b * BLOCK, inside[b], fired[b]);
}

static void fire(const lrfdyn_stage *stage, int32_t pixel, const currents *in) {
    const int32_t channels = stage->out->channels;
    uint8_t *spikes = (uint8_t *)stage->out->data + (size_t)pixel * (size_t)channels;
    for (int32_t first = 0; first < channels; first += 2 * BLOCK) fire_blocks(stage, in, first, spikes + first);
}
#else
static void fire(const lrfdyn_stage *stage, int32_t pixel, const currents *in) {
    const lrfdyn_map *out = stage->out;
    const int32_t channels = out->channels, all = out->steps, shift = stage->shift, fraction = stage->fraction;
    uint8_t *spikes = (uint8_t *)out->data + (size_t)pixel * (size_t)channels;
    for (int32_t first = 0; first < channels; first += BLOCK) {
        const int32_t *restrict threshold = stage->threshold + first;
        int32_t membrane[BLOCK] = {0}, fired[BLOCK] = {0};
        uint8_t bytes[BLOCK];
        for (int32_t step = 0; step < all; step++) {
            const int32_t *restrict current = in->sums + smaller(step, in->steps - 1) * in->stride + first;
            for (int32_t c = 0; c < BLOCK; c++) {
                const int32_t charged = (membrane[c] >> shift) + (int32_t)((uint32_t)current[c] << fraction);
                const int32_t spike = charged >= threshold[c];
                membrane[c] = spike ? 0 : charged;
                fired[c] |= spike << step;
            }
        }
        for (int32_t c = 0; c < BLOCK; c++) bytes[c] = (uint8_t)fired[c];
        memcpy(spikes + first, bytes, (size_t)smaller(BLOCK, channels - first));
    }
}
#endif

static void levels(const lrfdyn_stage *stage, const int32_t *restrict sums, int32_t *restrict row) {
    const int32_t channels = stage->out->channels, *restrict threshold = stage->threshold;
    memset(row, 0, (size_t)channels * sizeof(int32_t));
    for (int32_t level = 0; level < stage->levels; level++, threshold += channels)
        for (int32_t c = 0; c < channels; c++) row[c] += sums[c] >= threshold[c];
}

static void run_pixel(const lrfdyn_stage *stage, conv_state *state, int32_t pixel, int32_t steps, int32_t width,
                      int32_t *sums, int32_t *row) {
    const lrfdyn_map *out = stage->out;
    const int32_t y = pixel / out->width, x = pixel % out->width;
    int32_t i = 0;
    if (stage->terms[0].kind == LRFDYN_CONV) {
        const lrfdyn_term *term = &stage->terms[i++];
        accumulator a = {state->part, sums, stage->start, width, 0, term->limit, 0, 0, term->in->steps == 1, 0};
        convolve(term, state, y, x, steps, &a);
#ifdef FIRES_PARTS
        if (stage->count == 1 && stage->sink == LRFDYN_FIRE && steps <= GROUP) { /* the sums need no place */
            const currents in = {a.summed ? sums : stage->start, a.part, steps, a.summed ? width : 0, width};
            fire(stage, pixel, &in);
            if (a.used) memset(a.part, 0, (size_t)(GROUP * width) * sizeof(int16_t));
            return;
        }
#endif
        flush(&a);
    } else {
        for (int32_t step = 0; step < steps; step++)
            memcpy(sums + step * width, stage->start, (size_t)width * sizeof(int32_t));
    }
    for (; i < stage->count; i++)
        for (int32_t step = 0; step < steps; step++)
            apply(&stage->terms[i], y, x, step, out, width, sums + step * width, row);
    if (stage->sink == LRFDYN_FIRE) {
        const currents in = {sums, 0, steps, width, 0};
        fire(stage, pixel, &in);
        return;
    }
    for (int32_t step = 0; step < steps; step++) {
        if (stage->sink == LRFDYN_LEVELS) levels(stage, sums + step * width, row);
        store_row(out, pixel, step, stage->sink == LRFDYN_LEVELS ? row : sums + step * width);
    }
}

void lrfdyn_run_stage(const lrfdyn_stage *stage, void *scratch, lrfdyn_share share) {
    const lrfdyn_map *out = stage->out;
    const int32_t width = padded(out->channels), pixels = out->height * out->width;
    const int32_t first = first_of(share, pixels), end = end_of(share, pixels);
    int32_t steps = 1, most = width;
    conv_state state = {0};
    uint8_t *memory = (uint8_t *)scratch;
    for (int32_t i = 0; i < stage->count; i++) {
        const lrfdyn_term *term = &stage->terms[i];
        const lrfdyn_map *in = term->in;
        if (!in) continue;
        const int32_t taps = term->kind == LRFDYN_DENSE ? term->kernel_height * term->kernel_width : 1;
        steps = in->steps > steps ? in->steps : steps;
        most = taps * in->channels > most ? taps * in->channels : most;
        if (term->kind == LRFDYN_CONV) memory = open_conv(&state, term, first / out->width, width, memory);
    }
    int32_t *row = (int32_t *)(void *)memory;
    int32_t *sums = (int32_t *)(void *)(memory + round_up((size_t)most * sizeof(int32_t)));
    for (int32_t pixel = first; pixel < end; pixel++) run_pixel(stage, &state, pixel, steps, width, sums, row);
}

/* ---- operations on whole maps --------------------------------------------------------------------------------- */

void lrfdyn_max_pool(const lrfdyn_map *in, const lrfdyn_map *out, void *scratch, lrfdyn_share share) {
    const int32_t channels = in->channels, plain = in->kind == LRFDYN_SPIKES && in->planes == 1;
    const int32_t end = end_of(share, out->height * out->width);
    int32_t *best = (int32_t *)scratch, *row = best + channels;
    for (int32_t pixel = first_of(share, out->height * out->width); pixel < end; pixel++) {
        const int32_t y = pixel / out->width, x = pixel % out->width;
        const int32_t top = y ? 2 * y - 1 : 0, bottom = smaller(2 * y + 2, in->height);
        const int32_t left = x ? 2 * x - 1 : 0, right = smaller(2 * x + 2, in->width);
        if (plain) { /* all steps at once */
            uint8_t *to = (uint8_t *)out->data + (size_t)pixel * (size_t)channels;
            memset(to, 0, (size_t)channels);
            for (int32_t v = top; v < bottom; v++)
                for (int32_t u = left; u < right; u++) {
                    const uint8_t *from = spikes_at(in, v * in->width + u, 0);
                    for (int32_t c = 0; c < channels; c++) to[c] |= from[c];
                }
            continue;
        }
        for (int32_t step = 0; step < in->steps; step++) {
            load_row(in, top * in->width + left, step, best);
            for (int32_t v = top; v < bottom; v++)
                for (int32_t u = left; u < right; u++) {
                    load_row(in, v * in->width + u, step, row);
                    for (int32_t c = 0; c < channels; c++) best[c] = row[c] > best[c] ? row[c] : best[c];
                }
            store_row(out, pixel, step, best);
        }
    }
}

/* Planes are added as in a sum by hand, for all steps and channels at once. */
void lrfdyn_add_spikes(const lrfdyn_map *a, const lrfdyn_map *b, const lrfdyn_map *out, lrfdyn_share share) {
    const int32_t channels = out->channels, end = end_of(share, out->height * out->width);
    const uint8_t every = (uint8_t)((1 << out->steps) - 1);
    for (int32_t pixel = first_of(share, out->height * out->width); pixel < end; pixel++) {
        const uint8_t *left = spikes_at(a, pixel, 0), *right = spikes_at(b, pixel, 0);
        uint8_t *to = (uint8_t *)out->data + (size_t)pixel * out->planes * (size_t)channels;
        for (int32_t first = 0; first < channels; first += 64) {
            const int32_t count = smaller(64, channels - first);
            uint8_t carry[64] = {0};
            for (int32_t plane = 0; plane < out->planes; plane++)
                for (int32_t c = 0; c < count; c++) {
                    const int32_t at = plane * channels + first + c;
                    uint8_t x = plane < a->planes ? left[at] : 0, y = plane < b->planes ? right[at] : 0;
                    if (a->steps < out->steps) x = x ? every : 0; /* the same at all steps */
                    if (b->steps < out->steps) y = y ? every : 0;
                    const uint8_t either = (uint8_t)(x ^ y), both = (uint8_t)((x & y) | (carry[c] & either));
                    to[at] = (uint8_t)(either ^ carry[c]);
                    carry[c] = both;
                }
        }
    }
}

/* One head of attention at all steps. Its state is k^T v: of all tokens before q is multiplied with it, or if `causal`
   of those so far. */
#define MIX_HEAD(NAME, TYPE)                                                                                         \
    /* to[step] += from[step] where the step is fired in. */                                                         \
    static void add_steps_##TYPE(TYPE *restrict to, const TYPE *restrict from, int32_t fired, int32_t plane,         \
                                 int32_t steps, int32_t values) {                                                    \
        for (int32_t step = 0; step < steps; step++, fired >>= 1) {                                                  \
            const TYPE times = (TYPE)((fired & 1) << plane);                                                         \
            int32_t left = values;                                                                                   \
            for (; left >= LRFDYN_LANES; left -= LRFDYN_LANES, to += LRFDYN_LANES, from += LRFDYN_LANES)             \
                for (int32_t i = 0; i < LRFDYN_LANES; i++) to[i] = (TYPE)(to[i] + times * from[i]);                  \
            for (; left > 0; left--, to++, from++) *to = (TYPE)(*to + times * *from);                                \
        }                                                                                                            \
    }                                                                                                                \
    static void NAME(const lrfdyn_map *q, const lrfdyn_map *k, const lrfdyn_map *v, const lrfdyn_map *out,           \
                     int32_t keys, int32_t values, int32_t causal, int32_t head, int32_t *row, TYPE *state,          \
                     uint16_t *found) {                                                                              \
        const int32_t tokens = out->height * out->width, steps = out->steps, each = steps * values;                  \
        TYPE *value = state + keys * each; /* of a token: v, or what is read for q */                                \
        memset(state, 0, (size_t)(keys * each) * sizeof(TYPE));                                                      \
        for (int32_t token = 0; token < 2 * tokens; token++) {                                                       \
            const int32_t now = causal ? token / 2 : token % tokens, read = causal ? token % 2 : token / tokens;     \
            const lrfdyn_map *one = read ? q : k;                                                                    \
            memset(value, 0, (size_t)each * sizeof(TYPE));                                                           \
            for (int32_t plane = 0; !read && plane < v->planes; plane++) {                                           \
                const uint8_t *restrict from = spikes_at(v, now, plane) + head * values;                             \
                TYPE *restrict to = value;                                                                           \
                for (int32_t step = 0; step < steps; step++, to += values)                                           \
                    for (int32_t i = 0; i < values; i++) to[i] = (TYPE)(to[i] + (((from[i] >> step) & 1) << plane)); \
            }                                                                                                        \
            for (int32_t plane = 0; plane < one->planes; plane++) {                                                  \
                const uint8_t *fired = spikes_at(one, now, plane) + head * keys;                                     \
                int32_t count = 0;                                                                                   \
                for (int32_t c = 0; c < keys; c++) {                                                                 \
                    found[count] = (uint16_t)c;                                                                      \
                    count += fired[c] != 0;                                                                          \
                }                                                                                                    \
                for (int32_t i = 0; i < count; i++) {                                                                \
                    TYPE *own = state + found[i] * each;                                                             \
                    add_steps_##TYPE(read ? value : own, read ? own : value, fired[found[i]], plane, steps, values); \
                }                                                                                                    \
            }                                                                                                        \
            for (int32_t step = 0; read && step < steps; step++) {                                                   \
                for (int32_t i = 0; i < values; i++) row[head * values + i] = value[step * values + i];              \
                store_channels(out, now, step, row, head * values, (head + 1) * values);                             \
            }                                                                                                        \
        }                                                                                                            \
    }
MIX_HEAD(mix_head_16, int16_t)
MIX_HEAD(mix_head_32, int32_t)

void lrfdyn_ssa(const lrfdyn_map *q, const lrfdyn_map *k, const lrfdyn_map *v, const lrfdyn_map *out, int32_t heads,
                int32_t causal, void *scratch, lrfdyn_share share) {
    const int32_t keys = k->channels / heads, values = v->channels / heads, end = end_of(share, heads);
    int32_t *row = (int32_t *)scratch, *state = row + v->channels + keys;
    uint16_t *found = (uint16_t *)(void *)(row + v->channels);
    for (int32_t head = first_of(share, heads); head < end; head++)
        if (out->kind == LRFDYN_INT16) /* no state is larger than the largest sum */
            mix_head_16(q, k, v, out, keys, values, causal, head, row, (int16_t *)(void *)state, found);
        else
            mix_head_32(q, k, v, out, keys, values, causal, head, row, state, found);
}

/* p(a, b) = (a b + 2^14) >> 15, written as vector units have it. */
static int16_t product(int16_t a, int16_t b) { return (int16_t)((((int32_t)a * b >> 14) + 1) >> 1); }

/* One token of one mode, in every channel: a turn of (re, im), or two decays. */
static void turn(int16_t *restrict re, int16_t *restrict im, const int16_t *restrict a, const int16_t *restrict b,
                 const int16_t *restrict u, const int16_t *restrict unit, int32_t channels) {
    for (int32_t c = 0; c < channels; c++) {
        const int16_t r = re[c], i = im[c];
        re[c] = (int16_t)(product(r, a[c]) - product(i, b[c]) + (int16_t)(u[c] * unit[c]));
        im[c] = (int16_t)(product(r, b[c]) + product(i, a[c]));
    }
}

static void decay(int16_t *restrict state, const int16_t *restrict a, const int16_t *restrict u,
                  const int16_t *restrict unit, int32_t channels) {
    for (int32_t c = 0; c < channels; c++)
        state[c] = (int16_t)(product(state[c], a[c]) + (int16_t)(u[c] * unit[c]));
}

void lrfdyn_dendrites(const lrfdyn_map *in, const lrfdyn_map *out, const lrfdyn_modes *modes, void *scratch,
                      lrfdyn_share share) {
    const int32_t channels = in->channels, tokens = in->height * in->width, blocks = padded(channels) / LRFDYN_LANES;
    const int32_t first = first_of(share, blocks) * LRFDYN_LANES;
    const int32_t end = smaller(end_of(share, blocks) * LRFDYN_LANES, channels), count = end - first;
    if (count <= 0) return;
    const size_t states = (size_t)(2 * modes->modes * channels);
    int32_t *soma = (int32_t *)scratch, *own = soma + first;
    int16_t *state = (int16_t *)(void *)(soma + channels), *u = state + states;
    for (int32_t step = 0; step < in->steps; step++) {
        memset(state, 0, states * sizeof(int16_t));
        for (int32_t n = 0; n < tokens; n++) {
            const int32_t token = modes->reverse ? tokens - 1 - n : n;
            load_row(in, token, step, soma);
            for (int32_t c = 0; c < count; c++) u[c] = (int16_t)own[c];
            memcpy(own, modes->half + first, (size_t)count * sizeof(int32_t));
            for (int32_t mode = 0; mode < modes->modes; mode++) {
                const int32_t at = 2 * mode * channels + first;
                const int16_t *a = modes->coefficient + at, *w = modes->weight + at;
                const int16_t *unit = modes->unit + mode * channels + first;
                int16_t *re = state + at, *im = re + channels;
                if (modes->real) {
                    decay(re, a, u, unit, count);
                    decay(im, a + channels, u, unit, count);
                } else {
                    turn(re, im, a, a + channels, u, unit, count);
                }
                add_products_16(own, re, w, count);
                add_products_16(own, im, w + channels, count);
            }
            for (int32_t c = first; c < end; c++) soma[c] >>= modes->out_shift[c];
            store_channels(out, token, step, soma, first, end);
        }
    }
}

/* The sums are few: they are left to one thread. */
void lrfdyn_sum(const lrfdyn_map *in, const lrfdyn_map *out, void *scratch, lrfdyn_share share) {
    if (share.part) return;
    int32_t *row = (int32_t *)scratch, *sums = row + in->channels;
    const int32_t each = in->channels / out->channels, pixels = in->height * in->width;
    for (int32_t step = 0; step < out->steps; step++) {
        memset(sums, 0, (size_t)out->channels * sizeof(int32_t));
        for (int32_t pixel = 0; pixel < pixels; pixel++) {
            load_row(in, pixel, step, row);
            for (int32_t c = 0; c < in->channels; c++) sums[c / each] += row[c];
            if (out->height * out->width < pixels) continue;
            store_row(out, pixel, step, sums);
            memset(sums, 0, (size_t)out->channels * sizeof(int32_t));
        }
        if (out->height * out->width < pixels) store_row(out, 0, step, sums);
    }
}

void lrfdyn_head(const lrfdyn_map *in, const int16_t *weight, const int32_t *bias, int32_t classes, int32_t *logits,
                 void *scratch, lrfdyn_share share) {
    if (share.part) return;
    const int32_t channels = in->channels;
    int32_t *row = (int32_t *)scratch, *sums = row + channels;
    memset(sums, 0, (size_t)channels * sizeof(int32_t));
    for (int32_t pixel = 0; pixel < in->height * in->width; pixel++)
        for (int32_t step = 0; step < in->steps; step++) {
            load_row(in, pixel, step, row);
            add_row(sums, row, channels);
        }
    for (int32_t i = 0; i < classes; i++, weight += channels) {
        logits[i] = bias[i];
        for (int32_t c = 0; c < channels; c++) logits[i] += sums[c] * weight[c];
    }
}

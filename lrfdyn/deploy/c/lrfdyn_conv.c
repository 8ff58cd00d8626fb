#include "lrfdyn_conv.h"

#define SPARE 32 /* places behind lists that may be written, too */
#define COPIED 16 /* events that are copied at once */
#define MOST_TAPS 64

#include "lrfdyn_sums.h"

/* The channels of a pixel that fire are sorted by the pattern of time steps in which they do: what the channels of one
   pattern add is summed once, however many steps share it. There is a list for every plane, group of steps and pattern. */
static int32_t groups_of(const lrfdyn_map *in) { return (in->steps + GROUP - 1) / GROUP; }

static int32_t patterns_of(const lrfdyn_map *in) { return 1 << smaller(in->steps, GROUP); }

static int32_t lists_of(const lrfdyn_map *in) { return in->planes * groups_of(in) * patterns_of(in); }

/* How many places the events of a pixel take. */
static int32_t places_of(const lrfdyn_map *in) { return in->planes * groups_of(in) * in->channels; }

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

#if defined(__AVX512VBMI2__) && defined(__AVX512VL__) && defined(__AVX512BW__) && !defined(LRFDYN_PLAIN)
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

/* The sorted events of the pixel that a tap sees, and the first row of its weights. */
typedef struct {
    const uint16_t *events, *first;
    uint16_t row;
} seen_tap;

/* The taps of an output pixel that are inside the picture; returns how many. What they see is sorted. */
static int32_t find_taps(lrfdyn_conv *conv, int32_t y, int32_t x, seen_tap *taps) {
    const lrfdyn_term *term = conv->term;
    const lrfdyn_map *in = term->in;
    const int32_t top = y * term->stride - term->padding, left = x * term->stride - term->padding;
    const int32_t below = smaller(top + conv->held, in->height), places = places_of(in), lists = lists_of(in) + 1;
    for (; conv->sorted < below; conv->sorted++)
        for (int32_t column = 0; column < in->width; column++) {
            const int32_t slot = conv->sorted % conv->held * in->width + column;
            sort_events(in, conv->sorted * in->width + column, conv->merged, conv->events + (size_t)slot * (size_t)places,
                        conv->first + (size_t)slot * (size_t)lists);
        }
    int32_t count = 0;
    for (int32_t i = 0; i < term->kernel_height; i++) {
        const int32_t row = top + i * term->dilation;
        if (row < 0 || row >= in->height) continue;
        for (int32_t j = 0; j < term->kernel_width; j++) {
            const int32_t column = left + j * term->dilation;
            if (column < 0 || column >= in->width) continue;
            const size_t slot = (size_t)(row % conv->held * in->width + column);
            taps[count].events = conv->events + slot * (size_t)places;
            taps[count].first = conv->first + slot * (size_t)lists;
            taps[count++].row = (uint16_t)((i * term->kernel_width + j) * in->channels);
        }
    }
    return count;
}

/* The lists of a plane and a group of steps: those of all taps as one. Most are short: COPIED events at a time need no
   branch that depends on their number. */
static void find_lists(const lrfdyn_conv *conv, const seen_tap *taps, int32_t seen, int32_t group, row_lists *lists,
                       uint16_t *first) {
    const int32_t list = (lists->plane * groups_of(conv->term->in) + group) * lists->patterns;
    if (seen == 1 && taps->row == 0) {
        lists->rows = taps->events;
        lists->first = taps->first + list;
        return;
    }
    uint16_t *to = conv->merged;
    lists->rows = to;
    lists->first = first;
    *first = 0; /* that of no steps is empty */
    for (int32_t i = 1; i < lists->patterns; i++) {
        first[i] = (uint16_t)(to - conv->merged);
        for (int32_t tap = 0; tap < seen; tap++) {
            const uint16_t *events = taps[tap].events + taps[tap].first[list + i], row = taps[tap].row;
            int32_t left = taps[tap].first[list + i + 1] - taps[tap].first[list + i];
#ifdef VECTOR
            for (;; events += COPIED, left -= COPIED) {
#ifdef __AVX2__
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
    first[lists->patterns] = (uint16_t)(to - conv->merged);
}

uint8_t *lrfdyn_open_conv(lrfdyn_conv *conv, const lrfdyn_term *term, int32_t row, int32_t width, uint8_t *memory) {
    const lrfdyn_map *in = term->in;
    const int32_t top = row * term->stride - term->padding, taps = term->kernel_height * term->kernel_width;
#if defined(VECTOR) && defined(__GNUC__)
    const char *weight = (const char *)term->weight;
    for (int32_t i = 0; i < taps * in->channels * width; i += 64) /* in order that is quicker than as rows come */
        __builtin_prefetch(weight + i);
#endif
    conv->term = term;
    conv->width = width;
    conv->held = (term->kernel_height - 1) * term->dilation + 1;
    conv->sorted = top > 0 ? top : 0;
    const int32_t pixels = conv->held * in->width;
    conv->events = (uint16_t *)(void *)memory;
    memory += round_up((size_t)(pixels * places_of(in) + SPARE) * sizeof(uint16_t));
    conv->first = (uint16_t *)(void *)memory;
    memory += round_up((size_t)(pixels * (lists_of(in) + 1)) * sizeof(uint16_t));
    conv->merged = (uint16_t *)(void *)memory;
    memory += round_up((size_t)(taps * in->channels + SPARE) * sizeof(uint16_t));
    conv->part = (int16_t *)(void *)memory;
    memset(conv->part, 0, (size_t)(GROUP * width) * sizeof(int16_t));
    return memory + round_up((size_t)(GROUP * width) * sizeof(int16_t));
}

void lrfdyn_clear_conv(lrfdyn_conv *conv) {
    if (conv->used) memset(conv->part, 0, (size_t)(GROUP * conv->width) * sizeof(int16_t));
    conv->used = 0;
}

void lrfdyn_flush(lrfdyn_conv *conv) {
    const int32_t width = conv->width, once = conv->term->in->steps == 1; /* the same sums at all steps */
    for (int32_t step = conv->from; step < conv->to; step++) {
        const int32_t own = once ? 0 : step - conv->from;
        int32_t *sums = conv->sums + step * width;
        take_apart(conv->part + own * width, conv->summed ? sums : conv->start, sums, width);
    }
    lrfdyn_clear_conv(conv);
    conv->summed = 1;
}

static void add_all(lrfdyn_conv *conv, row_lists *lists) {
    const int32_t plane = lists->plane, end = lists->first[lists->patterns], limit = conv->term->limit;
    for (lists->from = lists->first[0]; lists->from < end; lists->from = lists->to) {
        lists->to = smaller(end, lists->from + (limit >> plane));
        const int32_t more = (lists->to - lists->from) << plane;
        if (conv->used + more > limit) lrfdyn_flush(conv);
        conv->used += more;
        add_lists(lists, conv->part);
    }
}

void lrfdyn_convolve(lrfdyn_conv *conv, int32_t y, int32_t x) {
    const lrfdyn_term *term = conv->term;
    const lrfdyn_map *in = term->in;
    seen_tap taps[MOST_TAPS];
    uint16_t first[PATTERNS + 1];
    row_lists lists = {(const int8_t *)term->weight, 0, 0, 0, 0, patterns_of(in), 0, conv->width};
    const int32_t seen = find_taps(conv, y, x, taps);
    for (int32_t group = 0; group < groups_of(in); group++) {
        if (group) lrfdyn_flush(conv);
        conv->from = group * GROUP;
        conv->to = in->steps == 1 ? conv->steps : smaller(conv->from + GROUP, conv->steps);
        conv->summed = 0;
        for (lists.plane = 0; lists.plane < in->planes; lists.plane++) {
            find_lists(conv, taps, seen, group, &lists, first);
            add_all(conv, &lists);
        }
    }
}

#include "lrfdyn_conv.h"

#define SPARE 64      /* places behind lists that may be written, too */
#define BLOCK 256     /* channels that a byte tells apart */
#define COPIED 16     /* events that are copied at once */
#define MOST_TAPS 64
#define MOST_GROUPS 2
#define MOST_FOLDED 3 /* planes that are added to another */
#define FEW 32        /* so many rows more take less time than lists of their own */

#include "lrfdyn_sums.h"

/* The channels of a pixel that fire are sorted by the pattern of time steps in which they do: what the channels of one
   pattern add is summed once, however many steps share it. There is a list for every plane, group of steps and pattern. */
static int32_t groups_of(const lrfdyn_map *in) { return (in->steps + GROUP - 1) / GROUP; }

static int32_t patterns_of(const lrfdyn_map *in) { return 1 << smaller(in->steps, GROUP); }

static int32_t lists_of(const lrfdyn_map *in) { return in->planes * groups_of(in) * patterns_of(in); }

/* How many places the events of a pixel take. */
static int32_t places_of(const lrfdyn_map *in) { return in->planes * groups_of(in) * in->channels; }

static int32_t blocks_of(int32_t channels) { return (channels + BLOCK - 1) / BLOCK; }

/* Of a row of pixels: its last may write what is spare, not what the next row has. */
static int32_t row_places_of(const lrfdyn_map *in) { return in->width * places_of(in) + SPARE; }

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

/* How many channels have one; eight at a time. */
static int32_t count_events(const uint8_t *bits, int32_t channels, int32_t shift) {
    const uint64_t ones = UINT64_C(0x0101010101010101), group = ones * (PATTERNS - 1);
    int32_t count = 0, c = 0;
    for (; c + 8 <= channels; c += 8) {
        uint64_t word;
        memcpy(&word, bits + c, 8);
        word = (((word >> shift) & group) + group) >> GROUP & ones; /* a one for every byte that is not 0 */
        count += (int32_t)(word * ones >> 56);
    }
    for (; c < channels; c++) count += ((bits[c] >> shift) & (PATTERNS - 1)) != 0;
    return count;
}

/* How many of the `most` planes behind one have so few events in a group of steps that these are better added to it:
   those of the next plane twice, and so on. No more than there are channels come together. */
static int32_t planes_to_fold(const uint8_t *bits, int32_t channels, int32_t shift, int32_t most) {
    int32_t fold = 0, total = most > 0 ? count_events(bits, channels, shift) : 0;
    for (; fold < smaller(most, MOST_FOLDED); fold++) {
        const int32_t count = count_events(bits + (fold + 1) * channels, channels, shift), rows = count << (fold + 1);
        total += rows;
        if (rows - count > FEW || total > channels) break;
    }
    return fold;
}

/* Sorts the events of a plane and a group of steps, and those of `fold` planes behind it, to places from `total` on;
   returns where they end. `found` has SPARE places more than there are channels. */
static int32_t sort_group(const uint8_t *bits, int32_t channels, int32_t shift, int32_t fold, int32_t patterns,
                          int32_t total, uint16_t *found, uint16_t *events, uint16_t *first) {
    int32_t place[PATTERNS] = {0}, end[1 + MOST_FOLDED];
    if (patterns == 2 && fold == 0) { /* there is one, and what is found is sorted */
        const int32_t count = find_events(bits, channels, shift, found);
        memcpy(events + total, found, (size_t)count * sizeof(uint16_t));
        first[0] = first[1] = (uint16_t)total;
        return total + count;
    }
    for (int32_t plane = 0, i = 0; plane <= fold; plane++) {
        const uint8_t *own = bits + plane * channels;
        end[plane] = i + find_events(own, channels, shift, found + i);
        for (; i < end[plane]; i++) place[(own[found[i]] >> shift) & (PATTERNS - 1)] += 1 << plane;
    }
    for (int32_t list = 0; list < patterns; list++) {
        const int32_t pattern = list ^ (list >> 1), length = place[pattern];
        first[list] = (uint16_t)total;
        place[pattern] = total;
        total += length;
    }
    for (int32_t plane = 0, i = 0; plane <= fold; plane++, bits += channels)
        for (; i < end[plane]; i++) {
            int32_t *to = &place[(bits[found[i]] >> shift) & (PATTERNS - 1)];
            for (int32_t times = 1 << plane; times > 0; times--) events[(*to)++] = found[i];
        }
    return total;
}

#if defined(__AVX512VBMI2__) && defined(__AVX512VL__) && defined(__AVX512BW__) && !defined(LRFDYN_PLAIN)
#define PACKED 4096 /* channels at most */

#define ALL_64(left) ((left) < 64 ? (UINT64_C(1) << (left)) - 1 : ~UINT64_C(0)) /* of those that are left, 64 at most */

static inline __m512i up_to_63(void) {
    return _mm512_set_epi8(63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43, 42, 41,
                           40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18,
                           17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

/* Those of 64 channels, which begin at `base`, that are in a list; returns where it ends. Others come behind them. */
static inline int32_t put_events(__mmask64 listed, __m512i index, int32_t base, uint16_t *events, int32_t total) {
    const __m512i channel = _mm512_maskz_compress_epi8(listed, index), from = _mm512_set1_epi16((short)base);
    const int32_t count = (int32_t)_mm_popcnt_u64(listed);
    STORE_32(events + total, ADD_32(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(channel)), from));
    if (count > 32) {
        const __m512i behind = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(channel, 1));
        STORE_32(events + total + 32, ADD_32(behind, from));
    }
    return total + count;
}

/* The channels from `c` to `last` that fire, and in which steps, so many times from place `to` on; returns where they
   end. */
static inline int32_t pack_events(const uint8_t *bits, int32_t c, int32_t last, __m512i group, int32_t times,
                                  uint8_t *found, uint8_t *fired_in, int32_t to) {
    const __m512i step = _mm512_set1_epi8(64);
    for (__m512i index = up_to_63(); c < last; c += 64, index = _mm512_add_epi8(index, step)) {
        const __m512i fired = _mm512_and_si512(_mm512_maskz_loadu_epi8(ALL_64(last - c), bits + c), group);
        const __mmask64 any = _mm512_test_epi8_mask(fired, fired);
        const __m512i channel = _mm512_maskz_compress_epi8(any, index);
        const __m512i pattern = _mm512_maskz_compress_epi8(any, fired);
        for (int32_t again = 0; again < times; again++) {
            _mm512_storeu_si512(found + to, channel);
            _mm512_storeu_si512(fired_in + to, pattern);
            to += (int32_t)_mm_popcnt_u64(any);
        }
    }
    return to;
}

/* The same without branches that depend on spikes: what fired moves together, and then what has the same pattern.
   Behind what fired of a block, patterns are 0, which none is. */
static int32_t sort_packed(const uint8_t *bits, int32_t channels, int32_t shift, int32_t fold, int32_t patterns,
                           int32_t total, uint8_t *found, uint16_t *events, uint16_t *first) {
    const __m512i group = _mm512_set1_epi8((char)((PATTERNS - 1) << shift));
    const int32_t blocks = blocks_of(channels);
    uint8_t *fired_in = found + channels + blocks * SPARE;
    int32_t begin[PACKED / BLOCK], end[PACKED / BLOCK], to = 0;
    first[0] = (uint16_t)total;
    if (patterns == 2 && fold == 0) { /* there is one */
        first[1] = (uint16_t)total;
        for (int32_t c = 0; c < channels; c += 64) {
            const __m512i some = _mm512_maskz_loadu_epi8(ALL_64(channels - c), bits + c);
            total = put_events(_mm512_test_epi8_mask(some, group), up_to_63(), c, events, total);
        }
        return total;
    }
    for (int32_t block = 0; block < blocks; block++, to += SPARE) {
        const int32_t c = block * BLOCK, last = smaller(channels, c + BLOCK);
        begin[block] = to;
        to = pack_events(bits, c, last, group, 1, found, fired_in, to);
        for (int32_t plane = 1; plane <= fold; plane++)
            to = pack_events(bits + plane * channels, c, last, group, 1 << plane, found, fired_in, to);
        _mm512_storeu_si512(fired_in + to, _mm512_setzero_si512());
        end[block] = to;
    }
    for (int32_t list = 1; list < patterns; list++) {
        const __m512i pattern = _mm512_set1_epi8((char)((list ^ (list >> 1)) << shift));
        first[list] = (uint16_t)total;
        for (int32_t block = 0; block < blocks; block++)
            for (int32_t i = begin[block]; i < end[block]; i += 64) {
                const __mmask64 same = _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(fired_in + i), pattern);
                total = put_events(same, _mm512_loadu_si512(found + i), block * BLOCK, events, total);
            }
    }
    return total;
}
#endif

static void sort_events(const lrfdyn_map *in, int32_t pixel, uint16_t *found, uint16_t *events, uint16_t *first) {
    const int32_t groups = groups_of(in), patterns = patterns_of(in), channels = in->channels;
    int32_t total = 0, next[MOST_GROUPS] = {0}; /* the first plane of a group that is not folded */
    for (int32_t plane = 0; plane < in->planes; plane++) {
        const uint8_t *bits = spikes_at(in, pixel, plane);
        for (int32_t group = 0; group < groups; group++, first += patterns) {
            const int32_t shift = group * GROUP;
            if (plane < next[group]) {
                for (int32_t list = 0; list < patterns; list++) first[list] = (uint16_t)total;
                continue;
            }
            const int32_t most = patterns == 2 ? 0 : in->planes - plane - 1; /* one list more takes no time */
            const int32_t fold = planes_to_fold(bits, channels, shift, most);
            next[group] = plane + fold + 1;
#ifdef PACKED
            if (channels <= PACKED) {
                total = sort_packed(bits, channels, shift, fold, patterns, total, (uint8_t *)found, events, first);
                continue;
            }
#endif
            total = sort_group(bits, channels, shift, fold, patterns, total, found, events, first);
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
    const size_t row_places = (size_t)row_places_of(in), row_lists = (size_t)(in->width * lists);
    for (; conv->sorted < below; conv->sorted++) {
        uint16_t *events = conv->events + (size_t)(conv->sorted % conv->held) * row_places;
        uint16_t *first = conv->first + (size_t)(conv->sorted % conv->held) * row_lists;
        for (int32_t column = 0; column < in->width; column++, events += places, first += lists)
            sort_events(in, conv->sorted * in->width + column, conv->merged, events, first);
    }
    int32_t count = 0;
    for (int32_t i = 0; i < term->kernel_height; i++) {
        const int32_t row = top + i * term->dilation;
        if (row < 0 || row >= in->height) continue;
        for (int32_t j = 0; j < term->kernel_width; j++) {
            const int32_t column = left + j * term->dilation;
            if (column < 0 || column >= in->width) continue;
            taps[count].events = conv->events + (size_t)(row % conv->held) * row_places + (size_t)(column * places);
            taps[count].first = conv->first + (size_t)(row % conv->held) * row_lists + (size_t)(column * lists);
            taps[count++].row = (uint16_t)((i * term->kernel_width + j) * in->channels);
        }
    }
    return count;
}

#if defined(__AVX2__) && defined(VECTOR)
#define COPY_ROWS(to, from, row) STORE_16(to, ADD_16(LOAD_16(from), _mm256_set1_epi16((short)row)))
#elif defined(VECTOR)
#define COPY_ROWS(to, from, row) \
    STORE_8(to, ADD_8(LOAD_8(from), SAME_8(row))), STORE_8(to + 8, ADD_8(LOAD_8(from + 8), SAME_8(row)))
#endif

/* The lists of a plane and a group of steps: those of all taps as one. Most are short: COPIED events at a time need no
   branch that depends on their number. */
static void find_lists(const lrfdyn_conv *conv, const seen_tap *taps, int32_t seen, int32_t group,
                             row_lists *lists, uint16_t *first) {
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
            const uint16_t *own = taps[tap].first + list + i, row = taps[tap].row;
            const uint16_t *events = taps[tap].events + own[0];
            const size_t count = (size_t)(own[1] - own[0]);
#ifdef VECTOR
            COPY_ROWS(to, events, row);
            for (size_t done = COPIED; done < count; done += COPIED) COPY_ROWS(to + done, events + done, row);
            to += count;
#else /* no more than there are */
            for (size_t done = 0; done < count; done++) *to++ = (uint16_t)(*events++ + row);
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
    memory += round_up((size_t)(conv->held * row_places_of(in)) * sizeof(uint16_t));
    conv->first = (uint16_t *)(void *)memory;
    memory += round_up((size_t)(pixels * (lists_of(in) + 1)) * sizeof(uint16_t));
    conv->merged = (uint16_t *)(void *)memory;
    memory += round_up((size_t)(taps * in->channels + blocks_of(in->channels) * SPARE) * sizeof(uint16_t));
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

#include "lrfdyn_conv.h"
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#define MOST_TAPS 64

/* ---- terms ---------------------------------------------------------------------------------------------------- */

/* The channels of a row, spread over `channels` channels and all pixels. */
static void load_spread(const lrfdyn_map *map, int32_t pixel, int32_t step, int32_t channels, int32_t *row) {
    const int32_t each = channels / map->channels;
    lrfdyn_load_row(map, map->height * map->width == 1 ? 0 : pixel, step, row);
    if (each > 1)
        for (int32_t c = channels; c-- > 0;) row[c] = row[c / each];
}

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
                lrfdyn_load_row(in, v * in->width + u, step, to);
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

/* A stencil of integers in 16 bits: two taps at once, 32 channels in registers for all of them. */
static void stencil_of_integers(const lrfdyn_term *term, int32_t y, int32_t x, int32_t step, int32_t *sums) {
    const lrfdyn_map *in = term->in;
    const int32_t channels = in->channels;
    const __m512i first_half = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i second_half = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    const int16_t *from[MOST_TAPS], *weight[MOST_TAPS];
    int32_t taps = 0;
    for (int32_t i = 0; i < term->kernel_height; i++)
        for (int32_t j = 0; j < term->kernel_width; j++) {
            const int32_t v = y * term->stride - term->padding + i * term->dilation;
            const int32_t u = x * term->stride - term->padding + j * term->dilation;
            if (v < 0 || v >= in->height || u < 0 || u >= in->width) continue;
            from[taps] = (const int16_t *)in->data + integers_at(in, v * in->width + u, smaller(step, in->steps - 1));
            weight[taps++] = (const int16_t *)term->weight + (size_t)((i * term->kernel_width + j) * channels);
        }
    for (int32_t c = 0; c < channels; c += 32) {
        const int32_t left = smaller(channels - c, 32);
        const __mmask32 inside = (__mmask32)((UINT64_C(1) << left) - 1);
        __m512i low = _mm512_setzero_si512(), high = low;
        for (int32_t i = 0; i < taps; i += 2) {
            const int32_t other = i + 1 < taps ? i + 1 : i;
            const __m512i p = _mm512_maskz_loadu_epi16(inside, from[i] + c);
            const __m512i q = _mm512_maskz_loadu_epi16(other > i ? inside : 0, from[other] + c);
            const __m512i a = _mm512_maskz_loadu_epi16(inside, weight[i] + c);
            const __m512i b = _mm512_maskz_loadu_epi16(inside, weight[other] + c);
            low = _mm512_add_epi32(low, _mm512_madd_epi16(_mm512_unpacklo_epi16(p, q), _mm512_unpacklo_epi16(a, b)));
            high = _mm512_add_epi32(high, _mm512_madd_epi16(_mm512_unpackhi_epi16(p, q), _mm512_unpackhi_epi16(a, b)));
        }
        const __m512i sum[2] = {_mm512_permutex2var_epi64(low, first_half, high),
                                _mm512_permutex2var_epi64(low, second_half, high)};
        for (int32_t b = 0; b < 2; b++) {
            const __mmask16 some = (__mmask16)(inside >> (16 * b));
            const __m512i before = _mm512_maskz_loadu_epi32(some, sums + c + 16 * b);
            _mm512_mask_storeu_epi32(sums + c + 16 * b, some, _mm512_add_epi32(before, sum[b]));
        }
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
    if (in->kind == LRFDYN_INT16 && term->kernel_height * term->kernel_width <= MOST_TAPS) {
        stencil_of_integers(term, y, x, step, sums);
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
                lrfdyn_add_products(sums, (const int16_t *)in->data + at, weight, channels);
            } else {
                lrfdyn_load_row(in, pixel, step, row);
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
            lrfdyn_add_row(sums, row, channels);
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
    if (term->extra) lrfdyn_add_row(sums, term->extra, channels);
}

/* ---- stages --------------------------------------------------------------------------------------------------- */

#define BLOCK 16 /* neurons at once */

/* What goes into the neurons of a pixel: `sums` [step], `stride` apart, the last of which holds for all steps behind it,
   and what `conv` has in 16 bits, or 0. */
typedef struct {
    const int32_t *sums;
    int32_t steps, stride;
    const lrfdyn_conv *conv;
} currents;

#if defined(__AVX512BW__) && !defined(LRFDYN_PLAIN)
#define FIRES_PARTS /* otherwise they are added to the sums before */
/* Two blocks at once, of which one need not wait for the other. */
static void fire_blocks(const lrfdyn_stage *stage, const currents *in, int32_t first, uint8_t *spikes) {
    const __m128i shift = _mm_cvtsi32_si128(stage->shift), fraction = _mm_cvtsi32_si128(stage->fraction);
    const int32_t *sums = in->sums + first, steps = stage->out->steps, left = stage->out->channels - first;
    const int16_t *part = in->conv ? in->conv->part + first : 0;
    const uint32_t all = left < 2 * BLOCK ? (UINT32_C(1) << left) - 1 : ~UINT32_C(0);
    const __mmask16 inside[2] = {(__mmask16)all, (__mmask16)(all >> BLOCK)};
    __m512i least[2], membrane[2], fired[2], bit = _mm512_set1_epi32(1);
    __mmask16 silent[2] = {0, 0};
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
            membrane[b] = _mm512_maskz_sra_epi32(silent[b], membrane[b], shift); /* 0 where it fired */
            membrane[b] = _mm512_add_epi32(membrane[b], _mm512_sll_epi32(sum, fraction));
            silent[b] = _mm512_cmplt_epi32_mask(membrane[b], least[b]);
            fired[b] = _mm512_mask_or_epi32(fired[b], (__mmask16)~silent[b], fired[b], bit);
        }
        bit = _mm512_add_epi32(bit, bit);
        if (step + 1 >= in->steps) continue;
        sums += in->stride;
        if (part) part += in->conv->width;
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

static void run_pixel(const lrfdyn_stage *stage, lrfdyn_conv *conv, int32_t pixel, int32_t steps, int32_t width,
                      int32_t *sums, int32_t *row) {
    const lrfdyn_map *out = stage->out;
    const int32_t y = pixel / out->width, x = pixel % out->width;
    int32_t i = 0;
    if (conv->term) {
        lrfdyn_convolve(conv, y, x);
#ifdef FIRES_PARTS
        if (stage->count == 1 && stage->sink == LRFDYN_FIRE && steps <= GROUP) { /* the sums need no place */
            const currents in = {conv->summed ? sums : stage->start, steps, conv->summed ? width : 0, conv};
            fire(stage, pixel, &in);
            lrfdyn_clear_conv(conv);
            return;
        }
#endif
        lrfdyn_flush(conv);
        i = 1;
    } else {
        for (int32_t step = 0; step < steps; step++)
            memcpy(sums + step * width, stage->start, (size_t)width * sizeof(int32_t));
    }
    for (; i < stage->count; i++)
        for (int32_t step = 0; step < steps; step++)
            apply(&stage->terms[i], y, x, step, out, width, sums + step * width, row);
    if (stage->sink == LRFDYN_FIRE) {
        const currents in = {sums, steps, width, 0};
        fire(stage, pixel, &in);
        return;
    }
    for (int32_t step = 0; step < steps; step++) {
        if (stage->sink == LRFDYN_LEVELS) levels(stage, sums + step * width, row);
        lrfdyn_store_row(out, pixel, step, stage->sink == LRFDYN_LEVELS ? row : sums + step * width);
    }
}

void lrfdyn_run_stage(const lrfdyn_stage *stage, void *scratch, lrfdyn_share share) {
    const lrfdyn_map *out = stage->out;
    const int32_t width = padded(out->channels), pixels = out->height * out->width;
    const int32_t first = first_of(share, pixels), end = end_of(share, pixels);
    int32_t steps = 1, most = width;
    lrfdyn_conv conv = {0};
    uint8_t *memory = (uint8_t *)scratch;
    for (int32_t i = 0; i < stage->count; i++) {
        const lrfdyn_term *term = &stage->terms[i];
        const lrfdyn_map *in = term->in;
        if (!in) continue;
        const int32_t taps = term->kind == LRFDYN_DENSE ? term->kernel_height * term->kernel_width : 1;
        steps = in->steps > steps ? in->steps : steps;
        most = taps * in->channels > most ? taps * in->channels : most;
        if (term->kind == LRFDYN_CONV) memory = lrfdyn_open_conv(&conv, term, first / out->width, width, memory);
    }
    int32_t *row = (int32_t *)(void *)memory;
    int32_t *sums = (int32_t *)(void *)(memory + round_up((size_t)most * sizeof(int32_t)));
    conv.start = stage->start;
    conv.sums = sums;
    conv.steps = steps;
    for (int32_t pixel = first; pixel < end; pixel++) run_pixel(stage, &conv, pixel, steps, width, sums, row);
}

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

#define STENCILS_TOGETHER

/* A stencil of integers in 16 bits, at `together` steps from `step` on: two taps at once, 32 channels in registers for
   all of them, and pairs of weights for all steps. */
static inline void stencil_at(const lrfdyn_map *in, const int16_t *const *from, const int16_t *const *weight,
                              int32_t taps, int32_t step, int32_t together, int32_t width, int32_t *sums) {
    const __m512i place[2] = {_mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4)};
    const int32_t channels = in->channels;
    for (int32_t c = 0; c < channels; c += 32) {
        const __mmask32 inside = (__mmask32)((UINT64_C(1) << smaller(channels - c, 32)) - 1);
        __m512i low[GROUP], high[GROUP];
        for (int32_t s = 0; s < together; s++) low[s] = high[s] = _mm512_setzero_si512();
        for (int32_t i = 0; i < taps; i += 2) {
            const int32_t other = i + 1 < taps ? i + 1 : i;
            const __m512i a = _mm512_maskz_loadu_epi16(inside, weight[i] + c);
            const __m512i b = _mm512_maskz_loadu_epi16(other > i ? inside : 0, weight[other] + c);
            const __m512i low_weights = _mm512_unpacklo_epi16(a, b), high_weights = _mm512_unpackhi_epi16(a, b);
            for (int32_t s = 0; s < together; s++) {
                const int32_t at = smaller(step + s, in->steps - 1) * channels + c;
                const __m512i p = _mm512_maskz_loadu_epi16(inside, from[i] + at);
                const __m512i q = _mm512_maskz_loadu_epi16(inside, from[other] + at);
                low[s] = _mm512_add_epi32(low[s], _mm512_madd_epi16(_mm512_unpacklo_epi16(p, q), low_weights));
                high[s] = _mm512_add_epi32(high[s], _mm512_madd_epi16(_mm512_unpackhi_epi16(p, q), high_weights));
            }
        }
        for (int32_t s = 0; s < together; s++)
            for (int32_t b = 0; b < 2; b++) {
                const __mmask16 some = (__mmask16)(inside >> (16 * b));
                int32_t *to = sums + (step + s) * width + c + 16 * b;
                const __m512i sum = _mm512_permutex2var_epi64(low[s], place[b], high[s]);
                _mm512_mask_storeu_epi32(to, some, _mm512_add_epi32(_mm512_maskz_loadu_epi32(some, to), sum));
            }
    }
}

/* At all steps, which are `width` apart. */
static void stencil_of_integers(const lrfdyn_term *term, int32_t y, int32_t x, int32_t steps, int32_t width,
                                int32_t *sums) {
    const lrfdyn_map *in = term->in;
    const int16_t *from[MOST_TAPS], *weight[MOST_TAPS];
    int32_t taps = 0, step = 0;
    for (int32_t i = 0; i < term->kernel_height; i++)
        for (int32_t j = 0; j < term->kernel_width; j++) {
            const int32_t v = y * term->stride - term->padding + i * term->dilation;
            const int32_t u = x * term->stride - term->padding + j * term->dilation;
            if (v < 0 || v >= in->height || u < 0 || u >= in->width) continue;
            from[taps] = (const int16_t *)in->data + integers_at(in, v * in->width + u, 0);
            weight[taps++] = (const int16_t *)term->weight + (i * term->kernel_width + j) * in->channels;
        }
    for (; step + GROUP <= steps; step += GROUP) stencil_at(in, from, weight, taps, step, GROUP, width, sums);
    for (; step < steps; step++) stencil_at(in, from, weight, taps, step, 1, width, sums);
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

/* The same at all steps, which are `width` apart. */
static void apply_all(const lrfdyn_term *term, int32_t y, int32_t x, int32_t steps, const lrfdyn_map *out,
                      int32_t width, int32_t *sums, int32_t *row) {
#ifdef STENCILS_TOGETHER
    const int32_t few = term->kernel_height * term->kernel_width <= MOST_TAPS;
    if (term->kind == LRFDYN_STENCIL && term->in->kind == LRFDYN_INT16 && few) {
        stencil_of_integers(term, y, x, steps, width, sums);
        for (int32_t step = 0; step < steps && term->extra; step++)
            lrfdyn_add_row(sums + step * width, term->extra, out->channels);
        return;
    }
#endif
    for (int32_t step = 0; step < steps; step++) apply(term, y, x, step, out, width, sums + step * width, row);
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

#if defined(__AVX512VL__) && defined(__AVX512BW__) && !defined(LRFDYN_PLAIN)
#define FIRES_PARTS /* otherwise they are added to the sums before */
/* Two blocks at once, of which one need not wait for the other. */
static void fire(const lrfdyn_stage *stage, int32_t pixel, const currents *in) {
    static const int16_t none[2 * BLOCK] = {0};
    const int32_t channels = stage->out->channels, steps = stage->out->steps;
    const __m128i shift = _mm_cvtsi32_si128(stage->shift), fraction = _mm_cvtsi32_si128(stage->fraction);
    const __m256i every = _mm256_set1_epi8((char)((1 << steps) - 1));
    uint8_t *spikes = (uint8_t *)stage->out->data + (size_t)pixel * (size_t)channels;
    for (int32_t first = 0; first < channels; first += 2 * BLOCK) {
        const int32_t *sums = in->sums + first, left = channels - first;
        const int16_t *part = in->conv ? in->conv->part + first : none;
        const uint32_t all = left < 2 * BLOCK ? (UINT32_C(1) << left) - 1 : ~UINT32_C(0);
        const __mmask16 inside[2] = {(__mmask16)all, (__mmask16)(all >> BLOCK)};
        __m512i least[2], membrane[2];
        __m256i quiet = _mm256_setzero_si256(), bit = _mm256_set1_epi8(1);
        __mmask16 silent[2] = {0, 0};
        for (int32_t b = 0; b < 2; b++) {
            least[b] = _mm512_maskz_loadu_epi32(inside[b], stage->threshold + first + b * BLOCK);
            membrane[b] = _mm512_setzero_si512();
        }
        for (int32_t step = 0; step < steps; step++) {
            for (int32_t b = 0; b < 2; b++) {
                const __m512i more = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(inside[b], part + b * BLOCK));
                const __m512i sum = _mm512_add_epi32(_mm512_maskz_loadu_epi32(inside[b], sums + b * BLOCK), more);
                membrane[b] = _mm512_maskz_sra_epi32(silent[b], membrane[b], shift); /* 0 where it fired */
                membrane[b] = _mm512_add_epi32(membrane[b], _mm512_sll_epi32(sum, fraction));
                silent[b] = _mm512_cmplt_epi32_mask(membrane[b], least[b]);
            }
            quiet = _mm256_mask_add_epi8(quiet, _mm512_kunpackw(silent[1], silent[0]), quiet, bit);
            bit = _mm256_add_epi8(bit, bit);
            if (step + 1 >= in->steps) continue;
            sums += in->stride;
            if (in->conv) part += in->conv->width;
        }
        _mm256_mask_storeu_epi8(spikes + first, all, _mm256_andnot_si256(quiet, every));
    }
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
    for (; i < stage->count; i++) apply_all(&stage->terms[i], y, x, steps, out, width, sums, row);
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

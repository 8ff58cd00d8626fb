#include "lrfdyn_maps.h"
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

/* The integers of all channels of a pixel at a step. */
void lrfdyn_load_row(const lrfdyn_map *map, int32_t pixel, int32_t step, int32_t *row) {
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
void lrfdyn_store_channels(const lrfdyn_map *map, int32_t pixel, int32_t step, const int32_t *row, int32_t first,
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
            lrfdyn_load_row(in, top * in->width + left, step, best);
            for (int32_t v = top; v < bottom; v++)
                for (int32_t u = left; u < right; u++) {
                    lrfdyn_load_row(in, v * in->width + u, step, row);
                    for (int32_t c = 0; c < channels; c++) best[c] = row[c] > best[c] ? row[c] : best[c];
                }
            lrfdyn_store_row(out, pixel, step, best);
        }
    }
}

/* Planes are added as in a sum by hand, for all steps and channels at once. A spike of a map with one step, of which
   `same` has the bits of all, is one at each of them. */
static void add_planes(const uint8_t *restrict left, uint8_t left_same, const uint8_t *restrict right,
                       uint8_t right_same, uint8_t *restrict carry, uint8_t *restrict to, int32_t count) {
    for (int32_t c = 0; c < count; c++) {
        const uint8_t x = (uint8_t)(left[c] | (-left[c] & left_same));
        const uint8_t y = (uint8_t)(right[c] | (-right[c] & right_same));
        const uint8_t either = (uint8_t)(x ^ y), before = carry[c];
        to[c] = (uint8_t)(either ^ before);
        carry[c] = (uint8_t)((x & y) | (before & either));
    }
}

void lrfdyn_add_spikes(const lrfdyn_map *a, const lrfdyn_map *b, const lrfdyn_map *out, lrfdyn_share share) {
    static const uint8_t none[64] = {0};
    const int32_t channels = out->channels, end = end_of(share, out->height * out->width);
    const uint8_t every = (uint8_t)((1 << out->steps) - 1);
    const uint8_t left_same = a->steps < out->steps ? every : 0, right_same = b->steps < out->steps ? every : 0;
    for (int32_t pixel = first_of(share, out->height * out->width); pixel < end; pixel++) {
        const uint8_t *left = spikes_at(a, pixel, 0), *right = spikes_at(b, pixel, 0);
        uint8_t *to = (uint8_t *)out->data + (size_t)pixel * out->planes * (size_t)channels;
        for (int32_t first = 0; first < channels; first += 64) {
            uint8_t carry[64] = {0};
            for (int32_t plane = 0; plane < out->planes; plane++) {
                const int32_t at = plane * channels + first;
                add_planes(plane < a->planes ? left + at : none, left_same, plane < b->planes ? right + at : none,
                           right_same, carry, to + at, smaller(64, channels - first));
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
                lrfdyn_store_channels(out, now, step, row, head * values, (head + 1) * values);                             \
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

#ifdef __AVX512BW__
#define MOST_MODES 8

/* Channels from `first` on, 32 at most, at a time step: their states stay in vectors for all tokens. */
static void dendrites_of_spikes(const lrfdyn_map *in, const lrfdyn_map *out, const lrfdyn_modes *modes, int32_t step,
                                int32_t first, int32_t count) {
    const int32_t channels = in->channels, tokens = in->height * in->width;
    const __mmask32 inside = (__mmask32)((UINT64_C(1) << count) - 1);
    const __mmask16 some[2] = {(__mmask16)inside, (__mmask16)(inside >> 16)};
    const __m512i place[2] = {_mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4)};
    const __m256i bit = _mm256_set1_epi8((char)(1 << step));
    __m512i state[2 * MOST_MODES], half[2], shift[2];
    for (int32_t i = 0; i < 2 * modes->modes; i++) state[i] = _mm512_setzero_si512();
    for (int32_t b = 0; b < 2; b++) {
        half[b] = _mm512_maskz_loadu_epi32(some[b], modes->half + first + 16 * b);
        shift[b] = _mm512_maskz_loadu_epi32(some[b], modes->out_shift + first + 16 * b);
    }
    for (int32_t n = 0; n < tokens; n++) {
        const int32_t token = modes->reverse ? tokens - 1 - n : n;
        const __m256i bits = _mm256_maskz_loadu_epi8(inside, spikes_at(in, token, 0) + first);
        const __mmask32 fired = _mm256_test_epi8_mask(bits, bit);
        __m512i low = _mm512_setzero_si512(), high = low;
        for (int32_t mode = 0; mode < modes->modes; mode++) {
            const int32_t at = 2 * mode * channels + first;
            const __m512i a = _mm512_maskz_loadu_epi16(inside, modes->coefficient + at);
            const __m512i b = _mm512_maskz_loadu_epi16(inside, modes->coefficient + at + channels);
            const __m512i p = _mm512_maskz_loadu_epi16(inside, modes->weight + at);
            const __m512i q = _mm512_maskz_loadu_epi16(inside, modes->weight + at + channels);
            const __m512i unit = _mm512_maskz_loadu_epi16(fired, modes->unit + mode * channels + first);
            __m512i re = state[2 * mode], im = state[2 * mode + 1];
            if (modes->real) {
                re = _mm512_add_epi16(_mm512_mulhrs_epi16(re, a), unit);
                im = _mm512_add_epi16(_mm512_mulhrs_epi16(im, b), unit);
            } else {
                const __m512i turned = _mm512_sub_epi16(_mm512_mulhrs_epi16(re, a), _mm512_mulhrs_epi16(im, b));
                im = _mm512_add_epi16(_mm512_mulhrs_epi16(re, b), _mm512_mulhrs_epi16(im, a));
                re = _mm512_add_epi16(turned, unit);
            }
            state[2 * mode] = re;
            state[2 * mode + 1] = im;
            low = _mm512_add_epi32(low, _mm512_madd_epi16(_mm512_unpacklo_epi16(re, im), _mm512_unpacklo_epi16(p, q)));
            high = _mm512_add_epi32(high, _mm512_madd_epi16(_mm512_unpackhi_epi16(re, im), _mm512_unpackhi_epi16(p, q)));
        }
        int16_t *to = (int16_t *)out->data + integers_at(out, token, step) + first;
        for (int32_t b = 0; b < 2; b++) {
            const __m512i sum = _mm512_add_epi32(half[b], _mm512_permutex2var_epi64(low, place[b], high));
            const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_srav_epi32(sum, shift[b]));
            _mm256_mask_storeu_epi16(to + 16 * b, some[b], narrow);
        }
    }
}
#endif

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
#ifdef __AVX512BW__
        const int32_t plain = in->kind == LRFDYN_SPIKES && in->planes == 1 && out->kind == LRFDYN_INT16;
        if (plain && modes->modes <= MOST_MODES) {
            for (int32_t c = first; c < end; c += 32)
                dendrites_of_spikes(in, out, modes, step, c, smaller(32, end - c));
            continue;
        }
#endif
        memset(state, 0, states * sizeof(int16_t));
        for (int32_t n = 0; n < tokens; n++) {
            const int32_t token = modes->reverse ? tokens - 1 - n : n;
            lrfdyn_load_row(in, token, step, soma);
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
                lrfdyn_add_products(own, re, w, count);
                lrfdyn_add_products(own, im, w + channels, count);
            }
            for (int32_t c = first; c < end; c++) soma[c] >>= modes->out_shift[c];
            lrfdyn_store_channels(out, token, step, soma, first, end);
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
            lrfdyn_load_row(in, pixel, step, row);
            for (int32_t c = 0; c < in->channels; c++) sums[c / each] += row[c];
            if (out->height * out->width < pixels) continue;
            lrfdyn_store_row(out, pixel, step, sums);
            memset(sums, 0, (size_t)out->channels * sizeof(int32_t));
        }
        if (out->height * out->width < pixels) lrfdyn_store_row(out, 0, step, sums);
    }
}

/* sums += 2^plane times how many steps there is a spike in */
static void add_fired(int32_t *restrict sums, const uint8_t *restrict bits, int32_t channels, int32_t plane) {
    for (int32_t c = 0; c < channels; c++) {
        const uint8_t twos = (uint8_t)(bits[c] - ((bits[c] >> 1) & 0x55));
        const uint8_t fours = (uint8_t)((twos & 0x33) + ((twos >> 2) & 0x33));
        sums[c] += ((fours + (fours >> 4)) & 15) << plane;
    }
}

void lrfdyn_head(const lrfdyn_map *in, const int16_t *weight, const int32_t *bias, int32_t classes, int32_t *logits,
                 void *scratch, lrfdyn_share share) {
    if (share.part) return;
    const int32_t channels = in->channels;
    int32_t *row = (int32_t *)scratch, *sums = row + channels;
    memset(sums, 0, (size_t)channels * sizeof(int32_t));
    for (int32_t pixel = 0; pixel < in->height * in->width; pixel++) {
        if (in->kind == LRFDYN_SPIKES) { /* all steps at once */
            for (int32_t plane = 0; plane < in->planes; plane++)
                add_fired(sums, spikes_at(in, pixel, plane), channels, plane);
            continue;
        }
        for (int32_t step = 0; step < in->steps; step++) {
            lrfdyn_load_row(in, pixel, step, row);
            lrfdyn_add_row(sums, row, channels);
        }
    }
    for (int32_t i = 0; i < classes; i++, weight += channels) {
        logits[i] = bias[i];
        for (int32_t c = 0; c < channels; c++) logits[i] += sums[c] * weight[c];
    }
}

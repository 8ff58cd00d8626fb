/* Integer kernels of spiking networks: C99, no allocation, no floating point, no dependencies.

   A map is a grid of pixels in raster order, channels innermost, all time steps of a pixel together:

     spikes    uint8_t [pixel][plane][channel]: bit t of a byte belongs to time step t. A count is the sum of its planes,
               of which plane k counts 2^k; plain spikes have one.
     integers  int16_t or int32_t [pixel][step][channel]
     pixels    uint8_t [channel][pixel], the picture as it comes

   Every sum fits its type: whoever writes a model computes bounds from its weights. Nothing is read or written outside of
   the maps and the scratch memory, whose size is planned with the model. Shifts of negative integers to the right must
   round down, as they do with every compiler we know. */
#ifndef LRFDYN_KERNELS_H
#define LRFDYN_KERNELS_H

#include <stdint.h>

/* Output channels of CONV and DENSE weights are padded to a multiple of this many. */
#define LRFDYN_LANES 16

enum { LRFDYN_SPIKES, LRFDYN_INT16, LRFDYN_INT32, LRFDYN_PIXELS };

typedef struct {
    void *data;
    int32_t height, width, channels;
    int32_t steps; /* at most 8; 1: the same at all steps of whatever reads it */
    uint8_t kind, planes;
} lrfdyn_map;

/* What a stage does to the sums [step][channel] of a pixel, one after the other. A map that it reads there may have one
   pixel, which holds for all, or fewer channels, each of which holds for several. */
enum {
    LRFDYN_CONV,     /* += spikes times int8_t weights [tap][in][out], spike by spike; at most one in a stage */
    LRFDYN_DENSE,    /* += integers times int8_t or int16_t weights [tap][in / groups][out] */
    LRFDYN_STENCIL,  /* += the neighbours of the same channel times int16_t weights [tap][channel] */
    LRFDYN_ADD,      /* += a map */
    LRFDYN_TIMES,    /* *= a map, then += bias */
    LRFDYN_MULTIPLY, /* *= int32_t multipliers [channel] */
    LRFDYN_RESCALE   /* = (sum * multiplier + half) >> shift in 64 bits, then cut to -limit ... limit */
};

typedef struct {
    uint8_t kind;
    uint8_t wide;          /* DENSE: weights of 16 bits */
    const lrfdyn_map *in;
    const void *weight;    /* weights or multipliers */
    const int32_t *extra;  /* bias [channel] or 0; RESCALE: shift [channel] */
    const uint8_t *border; /* DENSE: what pixels outside hold, [channel], or 0 for zeros */
    int32_t kernel_height, kernel_width, stride, padding, dilation, groups;
    int32_t limit; /* CONV: how many spikes always fit 16 bits; RESCALE: the largest result */
} lrfdyn_term;

enum {
    LRFDYN_STORE,
    /* M = (M >> shift) + (sum << fraction); a spike where M >= threshold [padded channel], and M = 0 then */
    LRFDYN_FIRE,
    LRFDYN_LEVELS /* how many of the thresholds [level][channel] are at most the sum */
};

typedef struct {
    const lrfdyn_term *terms;
    int32_t count;
    const int32_t *start; /* of the sums, [padded channel]: the bias of the first term, and zeros */
    const lrfdyn_map *out;
    uint8_t sink;
    const int32_t *threshold;
    int32_t shift, fraction, levels;
} lrfdyn_stage;

/* Several threads share the work of a kernel: each calls it for its own part of `parts`, with scratch memory of its own,
   and waits for the others before the next kernel. One alone has part 0 of 1. Bits do not depend on who computes them. */
typedef struct {
    int32_t part, parts;
} lrfdyn_share;

void lrfdyn_run_stage(const lrfdyn_stage *stage, void *scratch, lrfdyn_share share);

/* The largest of 3x3, stride 2, padding 1; pixels outside never win. */
void lrfdyn_max_pool(const lrfdyn_map *in, const lrfdyn_map *out, void *scratch, lrfdyn_share share);

/* Counts of spikes: out = a + b. */
void lrfdyn_add_spikes(const lrfdyn_map *a, const lrfdyn_map *b, const lrfdyn_map *out, lrfdyn_share share);

/* sum_j (q_n . k_j) v_j of each head, over all tokens j, or if `causal` over those up to n. */
void lrfdyn_ssa(const lrfdyn_map *q, const lrfdyn_map *k, const lrfdyn_map *v, const lrfdyn_map *out, int32_t heads,
                int32_t causal, void *scratch, lrfdyn_share share);

typedef struct {
    const int16_t *coefficient; /* [mode][2][channel], in 2^-15 */
    const int16_t *weight;      /* [mode][2][channel] */
    const int16_t *unit;        /* [mode][channel]: what a spike adds */
    const int32_t *half;        /* [channel]: a half of what is shifted out */
    const int32_t *out_shift;   /* [channel] */
    int32_t modes;
    uint8_t real, reverse; /* two decays instead of a turn; from the last token to the first */
} lrfdyn_modes;

/* Dendrites: soma potentials in 16 bits, the state zero before the first token of every time step. */
void lrfdyn_dendrites(const lrfdyn_map *in, const lrfdyn_map *out, const lrfdyn_modes *modes, void *scratch,
                      lrfdyn_share share);

/* Sums over all pixels where `out` has one, otherwise over as many groups of channels as `out` has channels. */
void lrfdyn_sum(const lrfdyn_map *in, const lrfdyn_map *out, void *scratch, lrfdyn_share share);

/* Logits: sums over pixels and steps, times int16_t weights [class][channel], plus a bias. */
void lrfdyn_head(const lrfdyn_map *in, const int16_t *weight, const int32_t *bias, int32_t classes, int32_t *logits,
                 void *scratch, lrfdyn_share share);

#endif

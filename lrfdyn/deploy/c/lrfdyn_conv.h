/* Convolutions of spikes: the rows of weights of the channels that fire are added. */
#ifndef LRFDYN_CONV_H
#define LRFDYN_CONV_H

#include "lrfdyn_maps.h"

#define GROUP 4 /* time steps whose spikes are sorted together */

/* What a convolution works with. Sums of a group of steps are made in 16 bits as long as they surely fit, and then added
   to those of 32 bits. */
typedef struct {
    const lrfdyn_term *term;
    int32_t width, steps; /* padded output channels; steps of the sums */
    uint16_t *events, *first; /* sorted events of the rows of the input that are held, and where their lists begin */
    int32_t held, sorted;     /* how many rows that are, and where those of the picture begin that are not sorted yet */
    uint16_t *merged;         /* the events of all taps of a pixel */
    int16_t *part;            /* [GROUP][width]: sums in 16 bits, zeros if nothing is `used` */
    int32_t used;             /* how many spikes are in them, of at most `limit` of the term */
    const int32_t *start;     /* [width]: holds instead of the sums as long as none are `summed` */
    int32_t *sums, summed;    /* [steps][width] */
    int32_t from, to;         /* the steps of the group */
} lrfdyn_conv;

/* `row` is the first of the output that is computed. Returns where the memory behind what it takes begins; `start`,
   `sums` and `steps` are left to the caller. */
uint8_t *lrfdyn_open_conv(lrfdyn_conv *conv, const lrfdyn_term *term, int32_t row, int32_t width, uint8_t *memory);

/* The sums of a pixel; those of the last group of steps may be in 16 bits still. */
void lrfdyn_convolve(lrfdyn_conv *conv, int32_t y, int32_t x);

/* Adds what is in 16 bits to the sums. */
void lrfdyn_flush(lrfdyn_conv *conv);

/* Forgets what is in 16 bits. */
void lrfdyn_clear_conv(lrfdyn_conv *conv);

#endif

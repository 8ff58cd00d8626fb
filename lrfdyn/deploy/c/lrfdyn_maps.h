/* What the kernels share: sizes, and rows of channels in and out of maps. */
#ifndef LRFDYN_MAPS_H
#define LRFDYN_MAPS_H

#include <stddef.h>
#include <string.h>

#include "lrfdyn_kernels.h"

static inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

static inline int32_t padded(int32_t channels) { return (channels + LRFDYN_LANES - 1) / LRFDYN_LANES * LRFDYN_LANES; }

/* Pieces of scratch memory begin at multiples of 64 bytes. */
static inline size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Of `count` pieces of work, the first of a share, and the one behind its last. */
static inline int32_t first_of(lrfdyn_share share, int32_t count) {
    const int32_t more = count % share.parts; /* parts that have one piece more than others */
    return count / share.parts * share.part + (share.part < more ? share.part : more);
}

static inline int32_t end_of(lrfdyn_share share, int32_t count) {
    share.part++;
    return first_of(share, count);
}

/* Where the channels of a pixel lie at a step; of spikes, those of a plane at all steps. */
static inline const uint8_t *spikes_at(const lrfdyn_map *map, int32_t pixel, int32_t plane) {
    return (const uint8_t *)map->data + ((size_t)pixel * map->planes + (size_t)plane) * (size_t)map->channels;
}

static inline size_t integers_at(const lrfdyn_map *map, int32_t pixel, int32_t step) {
    return ((size_t)pixel * (size_t)map->steps + (size_t)step) * (size_t)map->channels;
}

/* The integers of all channels of a pixel at a step. */
void lrfdyn_load_row(const lrfdyn_map *map, int32_t pixel, int32_t step, int32_t *row);

/* The channels from `first` to `end`. Steps are stored from the first to the last: the first clears what spikes held. */
void lrfdyn_store_channels(const lrfdyn_map *map, int32_t pixel, int32_t step, const int32_t *row, int32_t first,
                           int32_t end);

static inline void lrfdyn_store_row(const lrfdyn_map *map, int32_t pixel, int32_t step, const int32_t *row) {
    lrfdyn_store_channels(map, pixel, step, row, 0, map->channels);
}

static inline void lrfdyn_add_row(int32_t *restrict sums, const int32_t *restrict row, int32_t channels) {
    for (int32_t c = 0; c < channels; c++) sums[c] += row[c];
}

static inline void lrfdyn_add_products(int32_t *restrict sums, const int16_t *restrict x,
                                       const int16_t *restrict weight, int32_t channels) {
    for (int32_t c = 0; c < channels; c++) sums[c] += x[c] * weight[c];
}

#endif

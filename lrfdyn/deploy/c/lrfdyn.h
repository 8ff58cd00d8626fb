/* A network in integers: the sizes are those of lrfdyn_model.h. */
#ifndef LRFDYN_H
#define LRFDYN_H

#include <stdint.h>

#include "lrfdyn_model.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LRFDYN_OK = 0,
    LRFDYN_NULL = 1, /* a pointer is null */
    LRFDYN_SIZE = 2  /* a picture or a place for logits of another size */
};

/* The logits [LRFDYN_CLASSES] of a picture, levels from 0 to 255 in the order [channel][row][column]. Memory is static:
   one picture at a time. */
int lrfdyn_run(const uint8_t *pixels, int32_t *logits);

/* The same, told how many pixels and logits there are. */
int lrfdyn_run_checked(const uint8_t *pixels, uint32_t pixels_count, int32_t *logits, uint32_t logits_count);

#ifdef __cplusplus
}
#endif

#endif

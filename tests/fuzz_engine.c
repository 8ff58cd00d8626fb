/* Hostile calls of a model as C: fuzz_engine CASES SEED. Every buffer is exactly as long as the call says, so that the
   address sanitizer sees whatever is read or written outside. The pixels and logits of each call that must succeed are
   printed, to be compared with the definition; the exit code is 1 where a call returned another code than it should or
   touched logits in spite of an error. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lrfdyn.h"

static uint64_t state;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % below);
}

/* Noise, one level, a few bright pixels, black and white, or a slope. */
static void draw_pixels(uint8_t *pixels, uint32_t count) {
    const uint32_t kind = draw(5), level = draw(256), step = draw(16);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t noise = draw(256);
        pixels[i] = (uint8_t)(kind == 0   ? noise
                              : kind == 1 ? level
                              : kind == 2 ? (noise < 8 ? level : 0)
                              : kind == 3 ? (noise < level ? 255 : 0)
                                          : i * step + level);
    }
}

static int untouched(const int32_t *logits, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (logits[i] != 0x5A5A5A5A) return 0;
    return 1;
}

/* A count that is not the right one, and may be far from it. */
static uint32_t wrong_count(uint32_t right) {
    const uint32_t counts[] = {0, 1, right - 1, right + 1, 2 * right, UINT32_MAX, draw(4 * right)};
    const uint32_t count = counts[draw(sizeof counts / sizeof *counts)];
    return count == right ? right + 2 : count;
}

static int one_case(void) {
    const uint32_t kind = draw(2) ? draw(2) : 2 + draw(6); /* half of the calls are right */
    const uint32_t pixels_count = kind == 5 || kind == 7 ? wrong_count(LRFDYN_PICTURE) : LRFDYN_PICTURE;
    const uint32_t logits_count = kind == 6 || kind == 7 ? wrong_count(LRFDYN_CLASSES) : LRFDYN_CLASSES;
    /* What claims to be very long is short: it must not be looked at. */
    const uint32_t pixels_held = pixels_count < 4 * LRFDYN_PICTURE ? pixels_count : 1;
    const uint32_t logits_held = logits_count < 4 * LRFDYN_CLASSES ? logits_count : 1;
    const uint32_t offset = draw(8); /* pixels lie at any address */
    uint8_t *memory = malloc(pixels_held + offset), *pixels = memory + offset;
    int32_t *logits = malloc(sizeof(int32_t) * logits_held);
    if (!memory || !logits) return 0;
    draw_pixels(pixels, pixels_held);
    memset(logits, 0x5A, sizeof(int32_t) * logits_held);
    const uint8_t *given = kind == 2 || kind == 4 ? NULL : pixels;
    int32_t *place = kind == 3 || kind == 4 ? NULL : logits;
    const int expected = kind <= 1 ? LRFDYN_OK : kind <= 4 ? LRFDYN_NULL : LRFDYN_SIZE;
    const int plain = kind == 0 || (kind <= 4 && kind >= 2 && draw(2));
    const int code = plain ? lrfdyn_run(given, place) : lrfdyn_run_checked(given, pixels_count, place, logits_count);
    const int right = code == expected && (code == LRFDYN_OK || untouched(logits, logits_held));
    if (right && code == LRFDYN_OK) {
        fwrite(pixels, 1, LRFDYN_PICTURE, stdout);
        fwrite(logits, sizeof(int32_t), LRFDYN_CLASSES, stdout);
    }
    if (!right) fprintf(stderr, "kind %u, counts %u and %u: returned %d\n", kind, pixels_count, logits_count, code);
    free(memory);
    free(logits);
    return right;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    state = strtoull(arguments[2], NULL, 10);
    for (long left = strtol(arguments[1], NULL, 10); left > 0; left--)
        if (!one_case()) return 1;
    return 0;
}

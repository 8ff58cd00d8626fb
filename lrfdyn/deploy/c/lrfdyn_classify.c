/* Classifies pictures: ./lrfdyn_classify PICTURE ...

   A picture is a binary PGM (grey, P5) or PPM (colour, P6) file of the model's size with 255 as its largest level, as
   `magick photo.jpg -resize 32x32! -depth 8 photo.ppm` writes it. */
#include <stdio.h>

#include "lrfdyn.h"

static const char *const names[LRFDYN_CLASSES] = {LRFDYN_NAMES};

/* The next number of a header, behind white space and comments; -1 where there is none. */
static long read_number(FILE *file) {
    long value = -1;
    int c = getc(file);
    while (c == ' ' || c == '\t' || c == '\r' || c == '\n' || c == '#') {
        if (c == '#')
            while (c != '\n' && c != EOF) c = getc(file);
        else
            c = getc(file);
    }
    for (; c >= '0' && c <= '9' && value < 1000000; c = getc(file)) value = (value < 0 ? 0 : value) * 10 + (c - '0');
    return value; /* the white space that ends it is taken too */
}

/* Fills pixels [channel][row][column]; returns what is wrong with the picture, or 0. */
static const char *read_picture(FILE *file, uint8_t *pixels) {
    static char reason[100];
    const char kind = LRFDYN_CHANNELS == 3 ? '6' : '5';
    if (getc(file) != 'P' || getc(file) != kind) {
        snprintf(reason, sizeof reason, "expected a file that begins with P%c", kind);
        return reason;
    }
    const long width = read_number(file), height = read_number(file), most = read_number(file);
    if (width != LRFDYN_WIDTH || height != LRFDYN_HEIGHT) {
        snprintf(reason, sizeof reason, "expected %d x %d pixels, got %ld x %ld", LRFDYN_WIDTH, LRFDYN_HEIGHT, width,
                 height);
        return reason;
    }
    if (most != 255) return "expected 255 as the largest level";
    for (int pixel = 0; pixel < LRFDYN_HEIGHT * LRFDYN_WIDTH; pixel++)
        for (int channel = 0; channel < LRFDYN_CHANNELS; channel++) {
            const int level = getc(file);
            if (level == EOF) return "the file is cut off";
            pixels[channel * LRFDYN_HEIGHT * LRFDYN_WIDTH + pixel] = (uint8_t)level;
        }
    return 0;
}

int main(int count, char **paths) {
    static uint8_t pixels[LRFDYN_PICTURE];
    static int32_t logits[LRFDYN_CLASSES];
    int failed = 0;
    if (count < 2) {
        fprintf(stderr, "usage: %s PICTURE ...\n", paths[0]);
        return 2;
    }
    for (int i = 1; i < count; i++) {
        FILE *file = fopen(paths[i], "rb");
        const char *wrong = file ? read_picture(file, pixels) : "cannot be opened";
        if (file) fclose(file);
        if (!wrong && lrfdyn_run(pixels, logits) != LRFDYN_OK) wrong = "the model does not take it";
        if (wrong) {
            fprintf(stderr, "%s: %s\n", paths[i], wrong);
            failed = 1;
            continue;
        }
        int best = 0;
        for (int c = 1; c < LRFDYN_CLASSES; c++) best = logits[c] > logits[best] ? c : best;
        printf("%s: %s (logit %.2f)\n", paths[i], names[best], logits[best] * LRFDYN_SCALE);
    }
    return failed;
}

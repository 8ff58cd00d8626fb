/* Compares the logits of the pictures in lrfdyn_vectors.h with those that they must give, bit for bit. */
#include <stddef.h>
#include <stdio.h>

#include "lrfdyn.h"
#include "lrfdyn_vectors.h"

int main(void) {
    static int32_t logits[LRFDYN_CLASSES];
    int right = 0;
    for (int i = 0; i < LRFDYN_PICTURES; i++) {
        int same = lrfdyn_run(lrfdyn_pictures + (size_t)i * LRFDYN_PICTURE, logits) == LRFDYN_OK;
        for (int c = 0; c < LRFDYN_CLASSES; c++) same = same && logits[c] == lrfdyn_logits[i * LRFDYN_CLASSES + c];
        right += same;
    }
    printf("%d of %d pictures give the same logits bit for bit\n", right, LRFDYN_PICTURES);
    return right == LRFDYN_PICTURES ? 0 : 1;
}

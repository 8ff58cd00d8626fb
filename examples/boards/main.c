/* Prints the logits of the test pictures of a model, a picture a line, then the stack and the time that they took. */
#include "board.h"
#include "lrfdyn.h"
#include "lrfdyn_vectors.h"

static void write_number(int32_t value, const char *after) {
    char text[12], *first = text + sizeof text - 1;
    uint32_t rest = value < 0 ? 0u - (uint32_t)value : (uint32_t)value;
    *first = 0;
    do *--first = (char)('0' + rest % 10);
    while (rest /= 10);
    if (value < 0) *--first = '-';
    board_write(first);
    board_write(after);
}

int main(void) {
    static int32_t logits[LRFDYN_CLASSES];
    uint32_t longest = 0;
    int right = 1;
    for (int i = 0; i < LRFDYN_PICTURES; i++) {
        const uint32_t start = board_ticks();
        if (lrfdyn_run(lrfdyn_pictures + i * LRFDYN_PICTURE, logits) != LRFDYN_OK) return 1;
        const uint32_t ticks = (board_ticks() - start) & 0xFFFFFF;
        longest = ticks > longest ? ticks : longest;
        for (int c = 0; c < LRFDYN_CLASSES; c++) {
            write_number(logits[c], c + 1 < LRFDYN_CLASSES ? " " : "\n");
            right = right && logits[c] == lrfdyn_logits[i * LRFDYN_CLASSES + c];
        }
    }
    board_write("stack ");
    write_number((int32_t)board_stack(), " bytes\nlongest ");
    write_number((int32_t)longest, " ticks\n");
    return right ? 0 : 1;
}

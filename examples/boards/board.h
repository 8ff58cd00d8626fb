/* What main.c needs of the machine that it runs on. */
#ifndef BOARD_H
#define BOARD_H

#include <stdint.h>

void board_write(const char *text);

/* Bytes of stack that were used since the start; 0 where nobody counts them. */
uint32_t board_stack(void);

/* A clock that counts upwards and begins anew behind 2^24; always 0 where there is none. */
uint32_t board_ticks(void);

#endif

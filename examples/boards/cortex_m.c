/* A Cortex-M: what runs before main, its clock, and text through semihosting, which emulators and debuggers know. */
#include "board.h"

#define PAINT 0xA5A5A5A5u
#define PAINTED 65536 /* bytes of stack that are watched at most */

extern uint32_t data_stored[], data_start[], data_end[], bss_start[], bss_end[], stack_top[];

int main(void);
void reset(void);

static volatile uint32_t *const systick = (volatile uint32_t *)0xE000E010; /* control, start, now */

static void semihosting(uint32_t operation, const void *argument) {
    register uint32_t r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
}

static void end(int code) {
    const uint32_t reason[2] = {0x20026, (uint32_t)code}; /* the program has ended */
    semihosting(0x20, reason);
    for (;;) {}
}

static void fault(void) {
    board_write("fault\n");
    end(2);
}

void board_write(const char *text) { semihosting(0x04, text); }

/* Where the stack that is watched ends: not below what variables take. */
static uint32_t *stack_end(void) {
    return (uint32_t)stack_top - (uint32_t)bss_end < PAINTED ? bss_end : stack_top - PAINTED / 4;
}

/* The stack grows down into memory that was painted: where the paint is gone it was used. */
uint32_t board_stack(void) {
    const uint32_t *lowest = stack_end();
    while (lowest < stack_top && *lowest == PAINT) lowest++;
    return (uint32_t)((const char *)stack_top - (const char *)lowest);
}

uint32_t board_ticks(void) { return 0xFFFFFF - systick[2]; }

__attribute__((section(".vectors"), used)) static void (*const vectors[16])(void) = {
    (void (*)(void))stack_top, reset, fault, fault, fault, fault, fault, 0, 0, 0, 0, fault, fault, 0, fault, fault,
};

void reset(void) {
    const uint32_t *from = data_stored;
    for (volatile uint32_t *to = data_start; to < data_end;) *to++ = *from++;
    for (volatile uint32_t *to = bss_start; to < bss_end;) *to++ = 0;
    uint32_t *here = (uint32_t *)__builtin_frame_address(0) - 16; /* what this function itself uses stays */
    for (volatile uint32_t *to = stack_end(); to < here;) *to++ = PAINT;
    systick[1] = 0xFFFFFF;
    systick[2] = 0;
    systick[0] = 5; /* on, with the clock of the processor */
    end(main());
}

/* A model as C whose threads are pthreads, for the thread sanitizer: it knows how they wait for each other, and not how
   the threads of OpenMP do, of which it reports races that are none. WAIT is ALL_ARRIVE in this model. */
#include <pthread.h>
#include <stdint.h>

static pthread_barrier_t all;
#define ALL_ARRIVE pthread_barrier_wait(&all);

#include "lrfdyn_model.c"
#include "lrfdyn_vectors.h"

static int32_t logits[LRFDYN_CLASSES];

static void *one_part(void *part) {
    run(logits, (lrfdyn_share){(int32_t)(intptr_t)part, LRFDYN_THREADS});
    return 0;
}

int main(void) {
    pthread_t threads[LRFDYN_THREADS];
    int same = 1;
    map_0.data = (void *)(uintptr_t)lrfdyn_pictures;
    pthread_barrier_init(&all, 0, LRFDYN_THREADS);
    for (intptr_t i = 0; i < LRFDYN_THREADS; i++) pthread_create(&threads[i], 0, one_part, (void *)i);
    for (int i = 0; i < LRFDYN_THREADS; i++) pthread_join(threads[i], 0);
    for (int c = 0; c < LRFDYN_CLASSES; c++) same = same && logits[c] == lrfdyn_logits[c];
    return same ? 0 : 1;
}

/* A time of day that jumps, for one process: preloaded, it stands before the C library.

   jump_by(seconds) shifts what Python, C and C++ are told of the time of day. Steady clocks go on as
   they are. Waits until a time of day are shifted back, since the kernel's own clock has not jumped;
   one that had begun before the jump is not disturbed by it, as it would be on a real device. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Waits that tell a later time than this are by the time of day: no machine has run for so long. */
#define A_DATE 1000000000L

static volatile long shift_s;

void jump_by(long seconds) { shift_s += seconds; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*usual)(clockid_t, struct timespec *);
    if (!usual) usual = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = usual ? usual(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift_s;
    return status;
}

time_t time(time_t *also) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (also) *also = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    int status = clock_gettime(CLOCK_REALTIME, &found);
    (void)zone;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return status;
}

static struct timespec real(const struct timespec *until) {
    struct timespec found = *until;
    if (found.tv_sec > A_DATE) found.tv_sec -= shift_s;
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *one, pthread_mutex_t *lock, const struct timespec *until) {
    static int (*usual)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    /* On x86-64 the name alone finds an older one, for conditions of another size. */
    if (!usual) usual = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!usual) usual = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec found = real(until);
    return usual(one, lock, &found);
}

int sem_timedwait(sem_t *one, const struct timespec *until) {
    static int (*usual)(sem_t *, const struct timespec *);
    if (!usual) usual = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec found = real(until);
    return usual(one, &found);
}

/* Sums tensors over processes of one machine, in memory that all of them map.

   Each process has an area there. A tensor is summed in parts that fit into it: each process copies its part into its
   area, all meet, each adds up one slice over all areas in the order of ranks and writes the sum into all of them, all
   meet again, and each copies the part back. So each process adds only its share, and all get the same bits.

   Where they meet, a process that has to wait spins for a moment, then sleeps until the one that it waits for arrives
   (futex), so that its core is free for others. It never waits here for longer than its patience. */

#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

/* A process in the shared memory. 128 bytes, as processors fetch cache lines in pairs. */
typedef struct {
    _Atomic uint32_t meetings; /* how many it has arrived at */
    _Atomic uint32_t sleepers; /* how many processes sleep until it arrives at the next one */
    int64_t count;             /* of the elements that it wants to sum, and their type */
    int64_t type;
    char unused[104];
} Seat;

enum { COPY_IN, ADD, COPY_OUT }; /* the steps of a part, of which the last two begin when all have met */

/* What a process keeps for itself; shared_sums.py has the same struct. */
typedef struct {
    Seat *seats;
    char *areas;
    int64_t area_bytes;
    int32_t rank, world;
    int64_t spin_ns, patience_ns;
    uint32_t meetings;
    int32_t step;
    int64_t done; /* elements of the current tensor */
} Member;

enum { FLOAT32, FLOAT64, BFLOAT16, INT32, INT64 };
static const int64_t SIZES[] = {4, 8, 2, 4, 8};

enum { DONE, WAITS, DIFFERS }; /* what shared_sum returns */

/* ---------------------------------------------------------------- meeting */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The store and the load are sequentially consistent, and so is the sleeper's increment: either it is seen here, or the
   sleeper's futex sees that this process has arrived. */
static void arrive(Member *me) {
    Seat *mine = &me->seats[me->rank];
    atomic_store(&mine->meetings, ++me->meetings);
    if (atomic_load(&mine->sleepers)) syscall(SYS_futex, &mine->meetings, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
}

API int shared_has_arrived(const Member *me, int rank) {
    const uint32_t theirs = atomic_load_explicit(&me->seats[rank].meetings, memory_order_acquire);
    return (int32_t)(theirs - me->meetings) >= 0; /* the numbers may wrap around */
}

/* Waits until all have arrived where this process is; returns 0 at the deadline, and after a signal. */
static int all_have_arrived(const Member *me, int64_t deadline) {
    int64_t spin_until = 0;
    for (int rank = 0; rank < me->world; rank++) {
        Seat *seat = &me->seats[rank];
        while (!shared_has_arrived(me, rank)) {
            const int64_t now = now_ns();
            if (!spin_until) spin_until = now + me->spin_ns;
            if (now < spin_until) {
                for (int i = 0; i < 20; i++) relax();
                continue;
            }
            if (now >= deadline) return 0;

            const int64_t left = deadline - now;
            const struct timespec timeout = {left / 1000000000, left % 1000000000};
            atomic_fetch_add(&seat->sleepers, 1);
            const long slept = syscall(SYS_futex, &seat->meetings, FUTEX_WAIT, me->meetings - 1, &timeout, 0, 0);
            const int interrupted = slept < 0 && errno == EINTR;
            atomic_fetch_sub(&seat->sleepers, 1);
            if (interrupted) return 0;
        }
    }
    return 1;
}

/* ---------------------------------------------------------------- adding */

static inline float from_bf16(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* Rounds to the nearest, ties to even. */
static inline uint16_t to_bf16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(number == number ? rounded : 0x7fc0u); /* the second is NaN */
}

#define SAME(value) (value)
#define BLOCK 1024 /* elements whose sums stay in the first cache */

/* Adds elements first to end of all areas in type A, in the order of ranks, and writes the sums into all areas. */
#define DEFINE_ADD(name, T, A, load, store)                                                            \
    static void name(const Member *me, int64_t first, int64_t end) {                                   \
        A sums[BLOCK];                                                                                 \
        for (int64_t begin = first; begin < end; begin += BLOCK) {                                     \
            const int64_t n = end - begin < BLOCK ? end - begin : BLOCK;                               \
            for (int rank = 0; rank < me->world; rank++) {                                             \
                const T *restrict theirs = (const T *)(me->areas + rank * me->area_bytes) + begin;     \
                if (!rank)                                                                             \
                    for (int64_t i = 0; i < n; i++) sums[i] = load(theirs[i]);                         \
                else                                                                                   \
                    for (int64_t i = 0; i < n; i++) sums[i] += load(theirs[i]);                        \
            }                                                                                          \
            for (int rank = 0; rank < me->world; rank++) {                                             \
                T *restrict theirs = (T *)(me->areas + rank * me->area_bytes) + begin;                 \
                for (int64_t i = 0; i < n; i++) theirs[i] = store(sums[i]);                            \
            }                                                                                          \
        }                                                                                              \
    }

DEFINE_ADD(add_float32, float, float, SAME, SAME)
DEFINE_ADD(add_float64, double, double, SAME, SAME)
DEFINE_ADD(add_bfloat16, uint16_t, float, from_bf16, to_bf16)
DEFINE_ADD(add_int32, uint32_t, uint32_t, SAME, SAME) /* unsigned, so that they may wrap around */
DEFINE_ADD(add_int64, uint64_t, uint64_t, SAME, SAME)

static void (*const ADDITIONS[])(const Member *, int64_t, int64_t) = {
    add_float32, add_float64, add_bfloat16, add_int32, add_int64,
};

/* Adds up this process's slice of a part with n elements. Slices begin at cache lines, which two would else share. */
static void add_slice(const Member *me, int type, int64_t n) {
    const int64_t line = 64 / SIZES[type], lines = (n + line - 1) / line;
    const int64_t first = lines * me->rank / me->world * line, end = lines * (me->rank + 1) / me->world * line;
    ADDITIONS[type](me, first, end < n ? end : n);
}

/* Whether all want to sum tensors of one type and size. They write what they want before they meet, and again only
   after the second meeting that follows, so nobody writes while another reads. */
static int all_want(const Member *me, int64_t count, int type) {
    for (int rank = 0; rank < me->world; rank++)
        if (me->seats[rank].count != count || me->seats[rank].type != type) return 0;
    return 1;
}

/* Replaces a tensor by its sum over all processes. If it returns WAITS, call it again with the same tensor. */
API int shared_sum(Member *me, char *tensor, int64_t count, int type) {
    const int64_t deadline = now_ns() + me->patience_ns, size = SIZES[type], most = me->area_bytes / size;
    Seat *seat = &me->seats[me->rank];
    char *area = me->areas + me->rank * me->area_bytes;
    for (;;) {
        const int64_t left = count - me->done, n = left < most ? left : most;
        char *part = tensor + me->done * size;
        if (me->step == COPY_IN) {
            memcpy(area, part, n * size);
            seat->count = count;
            seat->type = type;
            arrive(me);
            me->step = ADD;
        }
        if (!all_have_arrived(me, deadline)) return WAITS;
        if (me->step == ADD) {
            if (!all_want(me, count, type)) return DIFFERS;
            add_slice(me, type, n);
            arrive(me);
            me->step = COPY_OUT;
            if (!all_have_arrived(me, deadline)) return WAITS;
        }
        memcpy(part, area, n * size);
        me->step = COPY_IN;
        me->done += n;
        if (me->done >= count) {
            me->done = 0;
            return DONE;
        }
        if (now_ns() >= deadline) return WAITS;
    }
}

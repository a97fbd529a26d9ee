// Runs one threadgroup at a time: each thread is a fiber that runs until it waits. The barriers and
// the simd_* functions are the only places where a thread waits, so a threadgroup in which nobody
// moves any more is a deadlock and is reported with the lines of the kernel.

#pragma once

#include <setjmp.h>
#include <stdint.h>
#include <ucontext.h>

typedef unsigned int uint;

// The linker provides the bounds of the section that holds the kernel's threadgroup variables.
#define EMU_SECTION_BOUND extern "C" __attribute__((weak, visibility("hidden"))) char
EMU_SECTION_BOUND __start_emu_threadgroup[];
EMU_SECTION_BOUND __stop_emu_threadgroup[];

namespace emu {
constexpr uint MAX_THREADS = 1024;
constexpr uint SIMD_WIDTH = 32;
constexpr long MAX_THREADGROUP_BYTES = 32 * 1024;
constexpr int STACK_BYTES = 1 << 16;

struct Triple {
  uint x, y, z;
  uint volume() const { return x * y * z; }
};

struct Fiber {
  ucontext_t entry;
  jmp_buf resume;
  char *stack;
  bool started, done;
  const char *waits_in;
  int line;
  Triple place;
};

static Fiber fibers[MAX_THREADS];
static jmp_buf scheduler;
static void (*kernel_body)();
static uint current, n_threads;
static long progress;
static char error[256];
static Triple grid, nominal_group, n_groups, group, group_size;

inline uint lane() { return current % SIMD_WIDTH; }

// After the first entry fibers switch by longjmp: ucontext costs two system calls a switch.
[[noreturn]] inline void back_to_scheduler() { _longjmp(scheduler, 1); }

__attribute__((noinline)) static void yield() {
  if (!_setjmp(fibers[current].resume)) back_to_scheduler();
}

__attribute__((noinline)) static void resume(Fiber &fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.entry);
}

template <class... Args> inline void report(const char *format, Args... args) {
  __builtin_snprintf(error, sizeof error, format, args...);
}

template <class... Args> [[noreturn]] inline void fail(const char *format, Args... args) {
  report(format, args...);
  back_to_scheduler();
}

// ---- waiting ------------------------------------------------------------------------------------

// A meeting point: the generation advances when all threads that have not returned are there.
struct Rendezvous {
  uint alive, arrived, generation;
  const char *name;
  int line;

  void wait(const char *what, int at) {
    if (arrived && (line != at || name != what))
      fail("divergent flow: one thread waits in %s (line %d), another one in %s (line %d)", name,
           line, what, at);
    name = fibers[current].waits_in = what;
    line = fibers[current].line = at;
    ++arrived;
    ++progress;
    uint mine = generation;
    if (arrived == alive) release();
    while (generation == mine) yield();
  }
  void release() {
    arrived = 0;
    ++generation;
  }
  void leave() {
    --alive;
    if (arrived && arrived == alive) release();
  }
};

// The slots are double-buffered: a lane is at most one exchange ahead of the slowest one.
struct SimdGroup {
  Rendezvous meeting;
  uint32_t active[2];
  uint64_t slots[2][SIMD_WIDTH];
};

static Rendezvous threadgroup_meeting;
static SimdGroup simdgroups[MAX_THREADS / SIMD_WIDTH];
inline SimdGroup &simdgroup() { return simdgroups[current / SIMD_WIDTH]; }

// What the lanes brought to one simd_* call. A lane that has returned brings nothing.
template <class T> struct Lanes {
  T values[SIMD_WIDTH];
  uint32_t active;
  uint first() const { return __builtin_ctz(active); }
  bool has(uint i) const { return i < SIMD_WIDTH && (active >> i & 1); }
};

template <class T> inline Lanes<T> exchange(T value, const char *what, int line) {
  static_assert(sizeof(T) <= 8, "simd_* takes scalars of at most 8 bytes");
  SimdGroup &group = simdgroup();
  uint side = group.meeting.generation % 2;
  if (group.meeting.arrived == 0) group.active[side] = 0;
  group.active[side] |= 1u << lane();
  __builtin_memcpy(&group.slots[side][lane()], &value, sizeof value);
  group.meeting.wait(what, line);
  Lanes<T> lanes;
  lanes.active = group.active[side];
  for (uint i = 0; i < SIMD_WIDTH; ++i)
    __builtin_memcpy(&lanes.values[i], &group.slots[side][i], sizeof value);
  return lanes;
}

inline void threadgroup_wait(int line) {
  if (threadgroup_meeting.alive < n_threads)
    fail("threadgroup_barrier (line %d) after another thread returned", line);
  threadgroup_meeting.wait("threadgroup_barrier", line);
}

// ---- running ------------------------------------------------------------------------------------

static void thread_main() {
  kernel_body();
  fibers[current].done = true;
  ++progress;
  simdgroup().meeting.leave();
  if (threadgroup_meeting.arrived)
    fail("a thread returned without the threadgroup_barrier (line %d) in which others wait",
         threadgroup_meeting.line);
  threadgroup_meeting.leave();
  back_to_scheduler();
}

static void prepare_thread(uint i) {
  Fiber &fiber = fibers[i];
  if (!fiber.stack) fiber.stack = (char *)__builtin_malloc(STACK_BYTES);
  getcontext(&fiber.entry);
  fiber.entry.uc_stack.ss_sp = fiber.stack;
  fiber.entry.uc_stack.ss_size = STACK_BYTES;
  makecontext(&fiber.entry, thread_main, 0);
  fiber.started = fiber.done = false;
  uint row = i / group_size.x;
  fiber.place = {i % group_size.x, row % group_size.y, row / group_size.y};
}

// Threadgroup memory is undefined at the start: all ones is NaN in every float type.
static void prepare_threadgroup() {
  n_threads = group_size.volume();
  for (uint i = 0; i < n_threads; ++i) prepare_thread(i);
  threadgroup_meeting = {n_threads, 0, 0, "", 0};
  for (uint i = 0; i * SIMD_WIDTH < n_threads; ++i) {
    uint rest = n_threads - i * SIMD_WIDTH;
    simdgroups[i].meeting = {rest < SIMD_WIDTH ? rest : SIMD_WIDTH, 0, 0, "", 0};
  }
  if (__start_emu_threadgroup)
    __builtin_memset(__start_emu_threadgroup, 0xff,
                     __stop_emu_threadgroup - __start_emu_threadgroup);
}

static void report_deadlock() {
  uint first = 0;
  while (fibers[first].done) ++first;
  const Fiber &a = fibers[first];
  for (uint i = first + 1; i < n_threads; ++i) {
    const Fiber &b = fibers[i];
    if (b.done || (a.line == b.line && a.waits_in == b.waits_in)) continue;
    report("deadlock: thread %u waits in %s (line %d), thread %u in %s (line %d)", first,
           a.waits_in, a.line, i, b.waits_in, b.line);
    return;
  }
  report("deadlock: thread %u waits in %s (line %d)", first, a.waits_in, a.line);
}

// The threads that returned. A simdgroup runs as far as it can before the next one does, so that a
// value which another simdgroup has yet to write is missed for sure.
static uint run_simdgroup(uint first, bool reverse) {
  uint rest = n_threads - first, n = rest < SIMD_WIDTH ? rest : SIMD_WIDTH, returned = 0;
  for (long before = -1; progress != before;) {
    before = progress;
    for (uint k = 0; k < n; ++k) {
      current = first + (reverse ? n - 1 - k : k);
      if (fibers[current].done) continue;
      resume(fibers[current]);
      if (error[0]) return returned;
      returned += fibers[current].done;
    }
  }
  return returned;
}

static void run_threadgroup(bool reverse) {
  prepare_threadgroup();
  uint n_simdgroups = (n_threads + SIMD_WIDTH - 1) / SIMD_WIDTH;
  for (uint left = n_threads; left;) {
    long before = progress;
    for (uint k = 0; k < n_simdgroups; ++k) {
      left -= run_simdgroup((reverse ? n_simdgroups - 1 - k : k) * SIMD_WIDTH, reverse);
      if (error[0]) return;
    }
    if (progress == before) return report_deadlock();
  }
}

// As with Metal's dispatchThreads, threadgroups at the grid's edges are smaller.
static uint edge(uint grid, uint group, uint index) {
  uint rest = grid - index * group;
  return rest < group ? rest : group;
}

// sizes: the grid in threads, then the threadgroup, which MLX clips to the grid before it gets here.
static const char *launch(void (*body)(), const uint *sizes, bool reverse) {
  kernel_body = body;
  error[0] = 0;
  grid = {sizes[0], sizes[1], sizes[2]};
  nominal_group = {sizes[3], sizes[4], sizes[5]};
  n_groups = {(grid.x + sizes[3] - 1) / sizes[3], (grid.y + sizes[4] - 1) / sizes[4],
              (grid.z + sizes[5] - 1) / sizes[5]};
  long bytes = __stop_emu_threadgroup - __start_emu_threadgroup;
  if (bytes > MAX_THREADGROUP_BYTES)
    report("%ld bytes of threadgroup memory, the limit is %ld", bytes, MAX_THREADGROUP_BYTES);
  for (uint k = 0; k < n_groups.volume() && !error[0]; ++k) {
    uint i = reverse ? n_groups.volume() - 1 - k : k;
    group = {i % n_groups.x, i / n_groups.x % n_groups.y, i / (n_groups.x * n_groups.y)};
    group_size = {edge(grid.x, nominal_group.x, group.x), edge(grid.y, nominal_group.y, group.y),
                  edge(grid.z, nominal_group.z, group.z)};
    run_threadgroup(reverse);
  }
  return error[0] ? error : nullptr;
}
} // namespace emu

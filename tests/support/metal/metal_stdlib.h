// The part of Metal's standard library that the kernels of this project and of mlx-lm use, for one thread of a CPU.
//
// A GPU thread is a fiber: a stack of its own, which gives up the CPU where it waits for other threads. A threadgroup
// runs until all its threads have ended. The next thread to run is drawn at random from those that can, so a missing
// barrier changes the result. Memory of a threadgroup is NaN before its first use.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#define device
#define constant
#define thread
#define METAL_FUNC inline

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;

// ---- types of numbers

typedef _Float16 half;
typedef half float16_t;

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  bfloat(float value) {
    uint32_t u;
    memcpy(&u, &value, 4);
    const bool nan = (u & 0x7fffffff) > 0x7f800000;
    bits = nan ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  operator float() const {
    const uint32_t u = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &u, 4);
    return value;
  }
};
typedef bfloat bfloat16_t;
// Metal rounds the result of these to bfloat. A kernel for this library converts its operands to float.
bfloat operator+(bfloat, bfloat) = delete;
bfloat operator-(bfloat, bfloat) = delete;
bfloat operator*(bfloat, bfloat) = delete;
bfloat operator/(bfloat, bfloat) = delete;
inline float operator*(float a, bfloat b) { return a * float(b); }
inline float operator*(bfloat a, float b) { return float(a) * b; }
inline float operator-(bfloat a, float b) { return float(a) - b; }

#include "metal_vec.h"
#include "metal_counts.h"

// ---- fibers

extern "C" void fiber_switch(void** save, void* load);
asm(R"(
.text
.globl fiber_switch
.hidden fiber_switch
fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace gpu {

struct Fiber {
  void* stack_pointer;
  char* stack;
  uint3 in_grid, in_group;
  uint index, lane, simdgroup;
};

// Threads that wait for each other: those of a simdgroup or of a threadgroup.
struct Team {
  uint members = 0;
  uint turn = 0;
  const char* operation = nullptr;
  uint line = 0;
  uint64_t common = 0;
  std::vector<Fiber*> waiting;
  char values[2][32][16];
};

constexpr size_t STACK_BYTES = 128 * 1024;
constexpr size_t MOST_SHARED_BYTES = 32 * 1024;
inline size_t shared_bytes;
inline size_t most_shared_bytes;
inline std::vector<Fiber> fibers;
inline std::vector<Fiber*> runnable;
inline std::vector<Team> simdgroups;
inline Team threadgroup_team;
inline std::vector<void*> shared_arrays;
inline Fiber* current;
inline void* scheduler;
inline uint64_t random_state;
inline uint ended;

inline uint64_t draw(uint64_t count) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state % count;
}

inline void give_up() { fiber_switch(&current->stack_pointer, scheduler); }

inline void fail(const char* found) {
  error = found;
  give_up();
}

// Wait for the other threads of `team` at `line` of the kernel. `common` are arguments that all of them give alike.
inline void meet(Team& team, const char* operation, uint line, uint64_t common = 0) {
  if (team.waiting.empty()) {
    team.operation = operation;
    team.line = line;
    team.common = common;
  }
  if (strcmp(team.operation, operation)) error = "threads that wait for each other do different things";
  else if (team.line != line) error = "threads wait for each other in different branches";
  else if (team.common != common) error = "the lanes of a simdgroup give different arguments";
  team.waiting.push_back(current);
  if (team.waiting.size() == team.members) {
    ++team.turn;
    runnable.insert(runnable.end(), team.waiting.begin(), team.waiting.end());
    team.waiting.clear();
  }
  give_up();
}

inline Team& own_simdgroup() { return simdgroups[current->simdgroup]; }

// Hand `value` to the other lanes. A lane overwrites its value two calls later, when all have read it.
template <typename T> inline void exchange(T value, T (&lanes)[32], const char* operation, uint line) {
  static_assert(sizeof(T) <= 16);
  Team& team = own_simdgroup();
  char(*values)[16] = team.values[team.turn & 1];
  memcpy(values[current->lane], &value, sizeof(T));
  meet(team, operation, line);
  for (uint i = 0; i < 32; ++i) memcpy(&lanes[i], values[i], sizeof(T));
}

// Memory of a threadgroup, at the place of its declaration.
inline void declare_shared(void* array, size_t bytes) {
  if (std::find(shared_arrays.begin(), shared_arrays.end(), array) != shared_arrays.end()) return;
  shared_arrays.push_back(array);
  memset(array, 0xff, bytes);
  shared_bytes += bytes;
  most_shared_bytes = std::max(most_shared_bytes, shared_bytes);
  if (shared_bytes > MOST_SHARED_BYTES) fail("a threadgroup declares more than 32 KB of memory");
}

typedef void (*Kernel)(const Fiber&);
inline Kernel kernel;

inline void run_fiber() {
  kernel(*current);
  ++ended;
  give_up();
}

inline void start(Fiber& fiber) {
  if (!fiber.stack) fiber.stack = static_cast<char*>(aligned_alloc(64, STACK_BYTES));
  // The last switch to the fiber returns into run_fiber, after the six saved registers.
  void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(run_fiber);
  top -= 6;
  memset(top, 0, 6 * sizeof(void*));
  fiber.stack_pointer = top;
  runnable.push_back(&fiber);
}

// Run one threadgroup whose first thread is at `origin`. The grid may end within it.
inline void run_threadgroup(uint3 origin, uint3 grid, uint3 size) {
  threadgroup_team = Team{};
  simdgroups.assign((size.x * size.y * size.z + 31) / 32, Team{});
  runnable.clear();
  shared_arrays.clear();
  shared_bytes = 0;
  ++group_number;
  ended = 0;
  uint count = 0;
  for (uint z = 0; z < size.z; ++z) for (uint y = 0; y < size.y; ++y) for (uint x = 0; x < size.x; ++x) {
    const uint3 place = {origin.x + x, origin.y + y, origin.z + z};
    if (place.x >= grid.x || place.y >= grid.y || place.z >= grid.z) continue;
    Fiber& fiber = fibers[count];
    fiber.in_grid = place;
    fiber.in_group = {x, y, z};
    fiber.index = count;
    fiber.lane = count % 32;
    fiber.simdgroup = count / 32;
    ++simdgroups[fiber.simdgroup].members;
    ++count;
    start(fiber);
  }
  threadgroup_team.members = count;
  while (!runnable.empty() && !error) {
    std::swap(runnable[draw(runnable.size())], runnable.back());
    current = runnable.back();
    runnable.pop_back();
    fiber_switch(&scheduler, current->stack_pointer);
  }
  if (!error && ended < count) error = "threads wait for others that never come";
}

struct Bytes {
  uint64_t shared;  // declared by one threadgroup
  uint64_t reads[][2];  // of each buffer: by all threads, and distinct in each threadgroup
};

inline const char* launch(Kernel body, uint3 grid, uint3 size, uint64_t seed, void** memory, const uint64_t* lengths,
                          uint count, Bytes* bytes) {
  kernel = body;
  error = nullptr;
  most_shared_bytes = 0;
  group_number = 0;
#ifdef COUNT_READS
  std::vector<std::vector<uint>> words;
  for (uint i = 0; i < count && i < std::size(counted); ++i) {
    words.emplace_back(lengths[i] / 4 + 1);
    counted[i] = {static_cast<char*>(memory[i]), lengths[i], 0, 0, words[i].data()};
  }
  buffers = words.size();
#endif
  random_state = seed * 0x9e3779b97f4a7c15 | 1;
  size = {std::min(size.x, grid.x), std::min(size.y, grid.y), std::min(size.z, grid.z)};
  const uint threads = size.x * size.y * size.z;
  if (fibers.size() < threads) fibers.resize(threads);
  for (uint z = 0; z < grid.z; z += size.z)
    for (uint y = 0; y < grid.y; y += size.y)
      for (uint x = 0; x < grid.x; x += size.x)
        if (!error) run_threadgroup({x, y, z}, grid, size);
  bytes->shared = most_shared_bytes;
  for (uint i = 0; i < buffers; ++i) {
    bytes->reads[i][0] = counted[i].read;
    bytes->reads[i][1] = counted[i].distinct;
  }
  buffers = 0;
  return error;
}

}  // namespace gpu

// ---- functions

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
// The line of a call tells calls in different branches apart.
#define LINE uint line = __builtin_LINE()
inline void threadgroup_barrier(mem_flags, LINE) { gpu::meet(gpu::threadgroup_team, "threadgroup_barrier", line); }
inline void simdgroup_barrier(mem_flags, LINE) { gpu::meet(gpu::own_simdgroup(), "simdgroup_barrier", line); }

template <typename T> inline T simd_shuffle_xor(T value, ushort mask, LINE) {
  T lanes[32];
  gpu::exchange(value, lanes, "simd_shuffle_xor", line);
  return lanes[(gpu::current->lane ^ mask) & 31];
}

template <typename T> inline T simd_shuffle(T value, ushort lane, LINE) {
  T lanes[32];
  gpu::exchange(value, lanes, "simd_shuffle", line);
  return lanes[lane & 31];
}

template <typename T> inline T simd_broadcast(T value, ushort lane, LINE) { return simd_shuffle(value, lane, line); }

// Lanes from which no lane takes a value keep their own.
template <typename T> inline T simd_shuffle_down(T value, ushort delta, LINE) {
  const uint lane = gpu::current->lane;
  return simd_shuffle(value, lane + delta < 32 ? lane + delta : lane, line);
}
template <typename T> inline T simd_shuffle_up(T value, ushort delta, LINE) {
  const uint lane = gpu::current->lane;
  return simd_shuffle(value, lane >= delta ? lane - delta : lane, line);
}

template <typename T, typename Join> inline T simd_fold(T value, Join join, const char* operation, uint line) {
  T lanes[32];
  gpu::exchange(value, lanes, operation, line);
  for (int mask = 16; mask; mask >>= 1)
    for (int i = 0; i < mask; ++i) lanes[i] = join(lanes[i], lanes[i + mask]);
  return lanes[0];
}

// The order of Metal's own sum is not known. Kernels whose bits matter write it as shuffles.
template <typename T> inline T simd_sum(T value, LINE) {
  return simd_fold(value, [](T a, T b) -> T { return a + b; }, "simd_sum", line);
}
template <typename T> inline T simd_max(T value, LINE) {
  return simd_fold(value, [](T a, T b) -> T { return a < b ? b : a; }, "simd_max", line);
}
template <typename T> inline T simd_min(T value, LINE) {
  return simd_fold(value, [](T a, T b) -> T { return b < a ? b : a; }, "simd_min", line);
}

typedef int atomic_int;
enum memory_order { memory_order_relaxed };
// Threads change only where they wait, so an addition is not divided.
inline int atomic_fetch_add_explicit(atomic_int* place, int value, memory_order) {
  const int before = *place;
  *place += value;
  return before;
}

template <typename To, typename From> inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To found;
  memcpy(&found, &value, sizeof(To));
  return found;
}
inline float exp(float x) { return ::expf(x); }
inline float exp2(float x) { return ::exp2f(x); }
inline float abs(float x) { return ::fabsf(x); }
inline float log(float x) { return ::logf(x); }
inline float log1p(float x) { return ::log1pf(x); }
inline float sqrt(float x) { return ::sqrtf(x); }
inline float rsqrt(float x) { return 1.0f / ::sqrtf(x); }
inline float sin(float x) { return ::sinf(x); }
inline float cos(float x) { return ::cosf(x); }
inline float sincos(float x, float& cosine) {
  cosine = ::cosf(x);
  return ::sinf(x);
}
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
template <typename T> inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> inline T max(T a, T b) { return a < b ? b : a; }
template <typename T> inline T clamp(T x, T least, T most) { return min(max(x, least), most); }

}  // namespace metal
using namespace metal;
#include "metal_simdgroup_matrix.h"

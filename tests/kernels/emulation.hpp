// Enough of CUDA C++ to run one kernel on a CPU: each thread of a block is a coroutine, which runs to its next barrier
// and goes on when the others of its block or warp are there.
//
// Stands for ptx.cu, before a kernel's own source. Shared memory starts as NaN in every block. Threads run in ascending
// or descending order, so that a barrier that is missing shows in one of them.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
constexpr unsigned SHARED = 232448 / 16, MOST_CLUSTER = 8;
alignas(16) float4 shared[SHARED * MOST_CLUSTER];  // of the blocks of a cluster one after another

template <class T> T __ldcs(const T* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T)) std::abort();  // as a GPU would
  return *p;
}
template <class T> void __stcs(T* p, T value) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T)) std::abort();
  *p = value;
}
template <class T> T __ldg(const T* p) { return __ldcs(p); }
template <bool STREAM, class T> T load_if(bool wanted, const T* p) { return wanted ? __ldcs(p) : T{}; }
template <bool STREAM, class T> void store_if(bool wanted, T* p, T value) { if (wanted) __stcs(p, value); }
template <class T> void copy_async(T* to, const T* from) { *to = __ldcs(from); }
inline void wait_copies() {}

inline unsigned bits_of(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline float float_of(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline float float_of_half(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return (float)h; }
inline unsigned short half_of_float(float value) { _Float16 h = (_Float16)value; unsigned short b; std::memcpy(&b, &h, 2); return b; }
inline float float_of_bfloat16(unsigned short bits) { return float_of((unsigned)bits << 16); }
inline unsigned short bfloat16_of_float(float value) {
  const unsigned bits = bits_of(value);
  return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

namespace emulation {
constexpr std::size_t STACK = 1 << 16;
struct Thread { ucontext_t context; bool done; std::vector<char> stack; };
struct Barrier { unsigned arrived, passed; };
static std::vector<Thread> threads;
static std::vector<Barrier> barriers;  // of each warp, then of the block
static std::vector<float> lanes;
static ucontext_t scheduler;
static void (*body)();
static unsigned running;
static bool moved;

// Opens a barrier that all threads from ``first`` to ``last`` that still run have come to.
inline void open(Barrier& barrier, unsigned first, unsigned last) {
  unsigned alive = 0;
  for (unsigned i = first; i < last; ++i) alive += !threads[i].done;
  if (barrier.arrived < alive || !alive) return;
  barrier.arrived = 0;
  ++barrier.passed;
}

inline void pause() { swapcontext(&threads[running].context, &scheduler); }

inline void wait(unsigned number, unsigned first, unsigned last) {
  Barrier& barrier = barriers[number];
  const unsigned passed = barrier.passed;
  ++barrier.arrived;
  open(barrier, first, last);
  moved = true;
  do pause();
  while (barrier.passed == passed);
  moved = true;
}

// Threads of a block; blocks of a cluster come one after another.
static unsigned each;

struct Group { unsigned number, first, last; };  // a barrier and its threads
inline Group block_of(unsigned i) {
  const unsigned warps = (each + 31) / 32, b = i / each;
  return {b * (warps + 1) + warps, b * each, b * each + each};
}
inline Group warp_of(unsigned i) {
  const Group all = block_of(i);
  const unsigned warp = i % each / 32, first = all.first + 32 * warp;
  return {all.number - (each + 31) / 32 + warp, first, std::min(first + 32, all.last)};
}
inline Group cluster() { return {(unsigned)barriers.size() - 1, 0, (unsigned)threads.size()}; }
inline void wait(const Group& group) { wait(group.number, group.first, group.last); }
inline void open(const Group& group) { open(barriers[group.number], group.first, group.last); }

static void start() {
  body();
  threads[running].done = moved = true;
  open(warp_of(running));
  open(block_of(running));
  open(cluster());
  pause();
}

// Blocks ``number`` to ``number + blocks`` of ``count`` threads, at a time.
inline void block(unsigned number, unsigned count, unsigned blocks, bool backwards) {
  each = count;
  for (unsigned i = 0; i < SHARED * blocks; ++i) shared[i] = {NAN, NAN, NAN, NAN};
  threads.resize(count * blocks);
  barriers.assign(((count + 31) / 32 + 1) * blocks + 1, {0, 0});
  lanes.assign(count * blocks, NAN);
  for (auto& thread : threads) {
    thread.done = false;
    thread.stack.resize(STACK);
    getcontext(&thread.context);
    thread.context.uc_stack = {thread.stack.data(), 0, STACK};
    makecontext(&thread.context, start, 0);
  }
  for (bool any = true; any;) {
    any = moved = false;
    for (unsigned i = 0; i < count * blocks; ++i) {
      running = backwards ? count * blocks - 1 - i : i;
      if (threads[running].done) continue;
      threadIdx.x = running % count;
      blockIdx.x = number + running / count;
      swapcontext(&scheduler, &threads[running].context);
      any = true;
    }
    if (any && !moved) std::abort();  // all wait for each other
  }
}
}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::block_of(emulation::running)); }
inline void __syncwarp() { emulation::wait(emulation::warp_of(emulation::running)); }

inline float4* shared_memory() { return shared + emulation::running / emulation::each * SHARED; }
inline void arrive_cluster() {}
inline void wait_cluster() { emulation::wait(emulation::cluster()); }
inline unsigned cluster_address(const void* p, unsigned rank) {
  const std::size_t offset = (const char*)p - (const char*)shared_memory();
  if (offset >= SHARED * sizeof(float4)) std::abort();
  return rank * SHARED * sizeof(float4) + offset;
}
template <class T> void store_cluster(unsigned address, T value) {
  if (address % sizeof(T)) std::abort();
  std::memcpy((char*)shared + address, &value, sizeof(T));
}

// All threads of a warp have to come here, as the mask says.
inline float __shfl_sync(unsigned mask, float value, int lane) {
  const unsigned me = emulation::running;
  const emulation::Group warp = emulation::warp_of(me);
  if (mask != ~0u || warp.last - warp.first < 32 || lane < 0 || lane > 31) std::abort();
  emulation::lanes[me] = value;
  emulation::wait(warp);
  value = emulation::lanes[warp.first + lane];
  emulation::wait(warp);
  return value;
}
inline float __shfl_xor_sync(unsigned mask, float value, int other) {
  return __shfl_sync(mask, value, (emulation::running % emulation::each % 32) ^ other);
}

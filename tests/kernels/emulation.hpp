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

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
alignas(16) float4 shared[232448 / 16];

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

inline unsigned warp_end(unsigned warp) { return std::min<std::size_t>(32 * warp + 32, threads.size()); }
inline void wait_warp() { wait(running / 32, running / 32 * 32, warp_end(running / 32)); }

static void start() {
  body();
  threads[running].done = moved = true;
  open(barriers[running / 32], running / 32 * 32, warp_end(running / 32));
  open(barriers.back(), 0, threads.size());
  pause();
}

inline void block(unsigned number, unsigned count, bool backwards) {
  blockIdx.x = number;
  for (auto& value : shared) value = {NAN, NAN, NAN, NAN};
  threads.resize(count);
  barriers.assign((count + 31) / 32 + 1, {0, 0});
  lanes.assign(count, NAN);
  for (auto& thread : threads) {
    thread.done = false;
    thread.stack.resize(STACK);
    getcontext(&thread.context);
    thread.context.uc_stack = {thread.stack.data(), 0, STACK};
    makecontext(&thread.context, start, 0);
  }
  for (bool any = true; any;) {
    any = moved = false;
    for (unsigned i = 0; i < count; ++i) {
      running = backwards ? count - 1 - i : i;
      if (threads[running].done) continue;
      threadIdx.x = running;
      swapcontext(&scheduler, &threads[running].context);
      any = true;
    }
    if (any && !moved) std::abort();  // all wait for each other
  }
}
}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::barriers.size() - 1, 0, emulation::threads.size()); }
inline void __syncwarp() { emulation::wait_warp(); }

// All threads of a warp have to come here, as the mask says.
inline float __shfl_xor_sync(unsigned mask, float value, int other) {
  const unsigned me = emulation::running;
  if (mask != ~0u || emulation::warp_end(me / 32) % 32) std::abort();
  emulation::lanes[me] = value;
  emulation::wait_warp();
  value = emulation::lanes[me ^ other];
  emulation::wait_warp();
  return value;
}

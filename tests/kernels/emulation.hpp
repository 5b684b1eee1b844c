// Enough of CUDA C++ to run one kernel on a CPU: each thread of a block is a coroutine, which runs to its next barrier.
//
// Stands for ptx.cu, before a kernel's own source. Shared memory starts as NaN in every block. Threads run in ascending
// or descending order, so that a barrier that is missing shows in one of them.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#define __device__
#define __global__
#define __shared__
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
static std::vector<Thread> threads;
static ucontext_t scheduler;
static void (*body)();
static unsigned running;

static void start() {
  body();
  threads[running].done = true;
  swapcontext(&threads[running].context, &scheduler);
}

inline void block(unsigned number, unsigned count, bool backwards) {
  blockIdx.x = number;
  for (auto& value : shared) value = {NAN, NAN, NAN, NAN};
  threads.resize(count);
  for (auto& thread : threads) {
    thread.done = false;
    thread.stack.resize(STACK);
    getcontext(&thread.context);
    thread.context.uc_stack = {thread.stack.data(), 0, STACK};
    makecontext(&thread.context, start, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (unsigned i = 0; i < count; ++i) {
      running = backwards ? count - 1 - i : i;
      if (threads[running].done) continue;
      threadIdx.x = running;
      swapcontext(&scheduler, &threads[running].context);
      any = true;
    }
  }
}
}  // namespace emulation

inline void __syncthreads() {
  const unsigned me = emulation::running;
  swapcontext(&emulation::threads[me].context, &emulation::scheduler);
}
inline void __syncwarp() { __syncthreads(); }

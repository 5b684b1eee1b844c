// From real planes to their spectra; fft2d.cu says how.

// Elements h of both columns of a pair, as one complex number; zero outside of the image.
struct Columns {
  const Real *first, *second;
  const Window& window;
  bool has0, has1;
  __device__ __forceinline__ float2 operator[](int h) const {
    constexpr bool stream = SPLIT1 == 1;  // with two threads a column, the second finds it in the cache
    const bool row = window.has_row(h);
    const i64 offset = window.row * h;
    if constexpr (VECTOR) return load_reals<stream, PADDED>(has0 && row, first + offset);
    const float a = load_real<stream, PADDED>(has0 && row, first + offset);
    return make_float2(a, load_real<stream, PADDED>(has1 && row, second + offset));
  }
};

// Frequencies PART, PART + SPLIT1, ... of one complex column into those of two real columns, into shared memory.
template <int PART>
__device__ __forceinline__ void separate(const float2 (&r)[M1], const Everywhere<float4>& s) {
#pragma unroll
  for (int i = 0; i < ROWS / SPLIT1; ++i) {
    const int k = SPLIT1 * i + PART;
    const float2 u = r[i], v = r[k == 0 ? M1 / 2 : M1 - i - 2 * PART / SPLIT1];
    s.store(k / HELD_ROWS, k % HELD_ROWS * PITCH,
            k == 0 ? make_float4(u.x, v.x, u.y, v.y) : make_float4(u.x + v.x, u.y - v.y, u.y + v.y, v.x - u.x));
  }
}

// Frequencies PART, PART + SPLIT2, ... of row k. ``edge``: k = 0, which also holds row N1/2.
template <int PART, class T, class Store>
__device__ __forceinline__ void emit(const float2 (&r)[M2], bool edge, const Rows<T>& target, Store store) {
#pragma unroll
  for (int i = 0; SPLIT2 * i + PART <= COLUMNS; ++i) {
    const int w = SPLIT2 * i + PART;
    const float2 q = r[w == 0 ? 0 : M2 - i - 2 * PART / SPLIT2];
    const float2 p = make_float2(0.5f * r[i].x, 0.5f * r[i].y), m = make_float2(0.5f * q.x, -0.5f * q.y);
    const float2 sum = make_float2(p.x + m.x, p.y + m.y), rest = make_float2(p.y - m.y, m.x - p.x);
    if (LAYOUT != PACKED) {
      store(target.own(w), edge ? sum : p);
      store(target.mirrored(w), edge ? rest : m);
    } else if (w == 0) {  // the four frequencies that are real for real data make two complex numbers
      const float2 h = r[M2 / 2], half = make_float2(0.5f * h.x, 0.5f * h.y);
      store(target.first, edge ? make_float2(r[0].x, h.x) : p);
      store(edge ? target.second : target.own(COLUMNS), edge ? make_float2(r[0].y, h.y) : half);
    } else if (w < COLUMNS) {
      store(target.own(w), edge ? sum : p);
      store(target.mirrored(w), edge ? rest : conjugate(m));
    }
  }
}

struct ToShared {
  __device__ __forceinline__ void operator()(float2* p, float2 value) const { *p = value; }
};
// Numbers of a spectrum as they lie in memory: complex64, or PARTS fp16 ones ``apart`` from each other, scaled.
template <bool WHOLE> struct Numbers { using type = float2; };
template <> struct Numbers<false> { using type = unsigned short; };
using Number = typename Numbers<PARTS == 1>::type;
struct ToMemory {
  i64 apart;
  float scale;
  __device__ __forceinline__ void operator()(float2* p, float2 value) const { store_complex(p, value); }
  __device__ __forceinline__ void operator()(unsigned short* p, float2 value) const {
    store_part<PARTS == 4>(p, apart, scale * value.x);
    store_part<PARTS == 4>(p + PARTS / 2 * apart, apart, scale * value.y);
  }
};

// The largest finite magnitude of the numbers of a block's threads, into ``peaks[block]``, as its bits.
__device__ __forceinline__ void store_peak(const float2 (&r)[M2], bool counts, float4* shared, int* peaks) {
  float peak = 0.f;
  if (counts) {
#pragma unroll
    for (int i = 0; i < M2; ++i) peak = larger(larger(peak, r[i].x), r[i].y);
  }
  float* all = (float*)shared;
  __syncthreads();  // what lies there has been read
  all[threadIdx.x] = peak;
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int i = threadIdx.x + 32; i < THREADS; i += 32) peak = larger(peak, all[i]);
    all[threadIdx.x] = peak;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < 32 && i < THREADS; ++i) peak = larger(peak, all[i]);
  peaks[blockIdx.x] = (int)bits_of(peak);
}

__device__ __forceinline__ void store_flat(Number* y, const float4* shared, i64 planes) {
  const int group = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
  const i64 first = first_plane() + (i64)(group * GROUP_PLANES);
  const Piece* from = (const Piece*)(shared + group * GROUP_PLANES * PLANE);
  Piece* to = (Piece*)(y + first * (N1 * HALF));
  if (first + GROUP_PLANES <= planes) {
#pragma unroll 8
    for (int i = lane; i < GROUP_PLANES * PIECES; i += GROUP) write(to + i, from[i]);
  } else {
    for (i64 i = lane; i < (planes - first) * PIECES; i += GROUP) write(to + i, from[i]);
  }
}

// ``peaks``: with PEAKS one number of each block; with PARTS the largest magnitude of real data, see ``scale_of``.
extern "C" __global__ void BOUNDS rfft2(const Real* __restrict__ x, Number* __restrict__ y, int* __restrict__ peaks,
                                        i64 planes, i64 inner, i64 x_outer, i64 x_inner, i64 x_row, i64 x_column, i64 height,
                                        i64 width, i64 top, i64 left, i64 y_outer, i64 y_inner, i64 y_frequency, i64 y_part,
                                        i64 spread) {
  float4* const shared = shared_memory();
  if constexpr (CLUSTER > 1) exchange();  // the others have started
  const Place c = place<COLUMNS, IMAGE_PLANES_FIRST>();
  if (all_work(COLUMNS, SPLIT1) || c.part < SPLIT1) {
    const Window window = {x_row, x_column, (int)height, (int)width, (int)top, (int)left};
    const Real* image = x + start(first_plane() + c.slot, planes, inner, x_outer, x_inner).offset;
    const int w0 = column0(c.lane), w1 = column1(c.lane);
    const bool has0 = window.has_column(w0), has1 = window.has_column(w1);
    const Columns z = {image + window.above(w0), image + window.above(w1), window, has0, has1};
    float2 r[M1];
    const Everywhere<float4> s(shared + c.slot * PLANE + c.lane);
    if constexpr (SPLIT1 == 1) {
#pragma unroll
      for (int h = 0; h < N1; ++h) r[h] = z[h];
      transform1(r);
      separate<0>(r, s);
    } else {
      const float sign = c.part ? -1.f : 1.f;
#pragma unroll
      for (int h = 0; h < M1; ++h) r[h] = plus_times(z[h], sign, z[h + M1]);
      if (c.part) rotate1(r);
      transform1(r);
      if (c.part) separate<SPLIT1 - 1>(r, s);
      else separate<0>(r, s);
    }
  }
  exchange();

  const Place p = place<ROWS, SPECTRUM_PLANES_FIRST>();
  const bool works = all_work(ROWS, SPLIT2) || p.part < SPLIT2;
  float2 r[M2];
  if (works) {
    const float4* s = shared + p.slot * PLANE + p.held * PITCH;
    if constexpr (SPLIT2 == 1) {
#pragma unroll
      for (int l = 0; l < COLUMNS; ++l) {
        const float4 v = s[l];
        r[column0(l)] = make_float2(v.x, v.y);
        r[column1(l)] = make_float2(v.z, v.w);
      }
    } else {
      const float sign = p.part ? -1.f : 1.f;
#pragma unroll
      for (int l = 0; l < COLUMNS / 2; ++l) {
        const float4 v = s[VECTOR ? l : 2 * l], u = s[VECTOR ? l + COLUMNS / 2 : 2 * l + 1];
        const float2 v0 = make_float2(v.x, v.y), v1 = make_float2(v.z, v.w);
        const float2 u0 = make_float2(u.x, u.y), u1 = make_float2(u.z, u.w);
        r[2 * l] = VECTOR ? plus_times(v0, sign, u0) : plus_times(v0, sign, v1);
        r[2 * l + 1] = VECTOR ? plus_times(v1, sign, u1) : plus_times(u0, sign, u1);
      }
      if (p.part) rotate2(r);
    }
    transform2(r);
  }
  if constexpr (PEAKS) store_peak(r, works, shared, peaks);

  if constexpr (LAYOUT == PLAIN) {
    synchronize();
    if (works) {
      const Rows<float2> target((float2*)(shared + p.slot * PLANE), p.lane, 1);
      if (SPLIT2 == 1 || !p.part) emit<0>(r, p.lane == 0, target, ToShared());
      else emit<SPLIT2 - 1>(r, p.lane == 0, target, ToShared());
    }
    synchronize();
    if constexpr (FLAT) {
      store_flat(y, shared, planes);
      return;
    }
    const int slot = threadIdx.x / EACH, lane = threadIdx.x % EACH;
    const Start to = start(first_plane() + slot, planes, inner, y_outer, y_inner);
    if (!to.exists) return;
    const Piece* from = (const Piece*)(shared + slot * PLANE);
    Piece* out = (Piece*)(y + to.offset);
#pragma unroll 8
    for (int i = lane; i < PIECES; i += EACH) write(out + i, from[i]);
  } else if (works) {
    const Start to = start(first_plane() + p.slot, planes, inner, y_outer, y_inner);
    if (!to.exists) return;
    const Rows<Number> target(y + to.offset, p.lane, y_frequency);
    const ToMemory store = {y_part, PARTS > 1 ? scale_of(*peaks, (int)spread) : 1.f};
    if (SPLIT2 == 1 || !p.part) emit<0>(r, p.lane == 0, target, store);
    else emit<SPLIT2 - 1>(r, p.lane == 0, target, store);
  }
}

// What winograd_planes.cu needs before: filters at POINTS points in fp16 parts, their exponents, and the largest
// exponents of shares of each image.
//
// A block of the first ones takes eight filters, of which there are multiples of CHANNELS: those beyond the last are
// zeros. Parts lie as matrix units read them: for each CHANNELS filters, each DEPTH channels and each point the high and
// the low parts of every tap down the lines, of each eight channels, filter by filter.

constexpr int THREADS = 256, OF_BLOCK = 8, OF_FILTER = THREADS / OF_BLOCK;

// The largest of ``value`` among OUT_OF threads that follow each other.
template <int OUT_OF> __device__ __forceinline__ int largest_of(int value, int* shared) {
  shared[threadIdx.x] = value;
  for (int half = OUT_OF / 2; half; half /= 2) {
    __syncthreads();
    if ((int)threadIdx.x % OUT_OF < half) shared[threadIdx.x] = max(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  __syncthreads();
  return shared[threadIdx.x / OUT_OF * OUT_OF];
}

// The bits of a finite magnitude, which sort as it does; those of others count as zero.
__device__ __forceinline__ int finite_bits(float value) {
  const int bits = (int)(bits_of(value) & 0x7fffffff);
  return bits < 0x7f800000 ? bits : 0;
}
__device__ __forceinline__ int finite_bits(float4 a) {
  return max(max(finite_bits(a.x), finite_bits(a.y)), max(finite_bits(a.z), finite_bits(a.w)));
}

// Of the elements that fall to a share of an image.
__device__ __forceinline__ int largest_bits(const float* x, i64 first, i64 step, i64 elements, i64 height, i64 width,
                                            i64 x_c, i64 x_h, i64 x_w) {
  int top = 0;
  if (DENSE >= 4) {
    const float4* fours = (const float4*)x;
    i64 e = first;
    for (; e + 3 * step < elements / 4; e += 4 * step) {
      const float4 a = __ldg(fours + e), b = __ldg(fours + e + step), c = __ldg(fours + e + 2 * step);
      const float4 d = __ldg(fours + e + 3 * step);
      top = max(max(top, max(finite_bits(a), finite_bits(b))), max(finite_bits(c), finite_bits(d)));
    }
    for (; e < elements / 4; e += step) top = max(top, finite_bits(__ldg(fours + e)));
    return top;
  }
  for (i64 e = first; e < elements; e += step) {
    i64 place = e;
    if (!DENSE) {
      const unsigned rest = (unsigned)e / (unsigned)width, column = (unsigned)e - rest * (unsigned)width;
      const unsigned c = rest / (unsigned)height, line = rest - c * (unsigned)height;
      place = c * x_c + line * x_h + column * x_w;
    }
    top = max(top, finite_bits(x[place]));
  }
  return top;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
winograd_prepare(const float* __restrict__ x, const float* __restrict__ w, int* __restrict__ peaks,
                 unsigned short* __restrict__ parts, int* __restrict__ exponents, i64 filters, i64 channels, i64 w_o,
                 i64 w_c, i64 w_h, i64 w_w, i64 shares, i64 elements, i64 height, i64 width, i64 x_n, i64 x_c, i64 x_h,
                 i64 x_w) {
  int* shared = (int*)shared_memory();
  const int blocks = (int)((filters + CHANNELS - 1) / CHANNELS) * CHANNELS / OF_BLOCK;
  if ((int)blockIdx.x >= blocks) {
    const int share = ((int)blockIdx.x - blocks) % (int)shares, image = ((int)blockIdx.x - blocks) / (int)shares;
    const int bits = largest_bits(x + image * x_n, share * THREADS + threadIdx.x, shares * THREADS, elements, height, width,
                                  x_c, x_h, x_w);
    const int top = largest_of<THREADS>(bits, shared);
    if (threadIdx.x == 0) peaks[image * shares + share] = top >> 23;
    return;
  }
  const int own = (int)blockIdx.x * OF_BLOCK + (int)threadIdx.x / OF_FILTER;
  int top = 0;
  for (int e = (int)threadIdx.x % OF_FILTER; own < filters && e < channels * TAPS; e += OF_FILTER) {
    const float* line = w + own * w_o + e / TAPS * w_c + e % TAPS * w_h;
#pragma unroll
    for (int i = 0; i < WIDE_TAPS; ++i) top = max(top, finite_bits(line[i * w_w]));
  }
  const int found = max(largest_of<OF_FILTER>(top, shared) >> 23, 15);
  if (own < filters && threadIdx.x % OF_FILTER == 0) exponents[own] = found + FILTER_SHIFT;
  // Neighbouring threads take neighbouring filters.
  const int which = (int)threadIdx.x % OF_BLOCK, o = (int)blockIdx.x * OF_BLOCK + which;
  const float scale = float_of((unsigned)(268 - FILTER_SHIFT - max(shared[which * OF_FILTER] >> 23, 15)) << 23);
  constexpr int EACH = 4, EIGHT = CHANNELS * 8, TAP = DEPTH / 8 * EIGHT, PART = TAPS * TAP;
  const int steps = (int)(channels + DEPTH - 1) / DEPTH;
  for (int e = (int)threadIdx.x / OF_BLOCK; e < steps * DEPTH / EACH * TAPS; e += OF_FILTER) {
    const int tap = e % TAPS, c = e / TAPS * EACH;
    unsigned high[POINTS][2], low[POINTS][2];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const bool there = o < filters && c + i < channels;
      const float* line = w + (there ? o * w_o + (c + i) * w_c + tap * w_h : 0);
      float g[WIDE_TAPS];
#pragma unroll
      for (int t = 0; t < WIDE_TAPS; ++t) g[t] = there ? line[t * w_w] * scale : 0.f;
#pragma unroll
      for (int point = 0; point < POINTS; ++point) {
        float value = 0.f;
#pragma unroll
        for (int t = 0; t < WIDE_TAPS; ++t) value = fmaf(FILTER_MATRIX[point][t], g[t], value);
        const unsigned part = half_of_float(value), rest = half_of_float(value - float_of_half((unsigned short)part));
        high[point][i / 2] = i % 2 ? high[point][i / 2] | part << 16 : part;
        low[point][i / 2] = i % 2 ? low[point][i / 2] | rest << 16 : rest;
      }
    }
    unsigned short* to = parts + (i64)(o / CHANNELS * steps + c / DEPTH) * POINTS * 2 * PART + tap * TAP +
                         c % DEPTH / 8 * EIGHT + o % CHANNELS * 8 + c % 8;
#pragma unroll
    for (int point = 0; point < POINTS; ++point) {
      *(uint2*)(to + 2 * point * PART) = make_uint2(high[point][0], high[point][1]);
      *(uint2*)(to + (2 * point + 1) * PART) = make_uint2(low[point][0], low[point][1]);
    }
  }
}

// From signals and output gradients to gradients of filters; depthwise1d.cu says how.
//
// A block takes channels and a share of the images, tile by tile, sums the products of their spectra in registers and
// goes back once. A signal's spectrum waits in shared memory, each thread's own numbers, until the output gradient's is
// there.

extern "C" __global__ void BOUNDS depthwise1d_gradient(const Real* __restrict__ x, const Real* __restrict__ y,
                                                       Result* __restrict__ w, i64 channels, i64 images, i64 tiles,
                                                       i64 shares, i64 tile, i64 x_channel, i64 x_image, i64 x_step,
                                                       i64 x_length, i64 x_first, i64 y_channel, i64 y_image,
                                                       i64 y_step, i64 y_length, i64 w_share, i64 w_channel,
                                                       i64 w_step, i64 taps, double scale) {
  extern __shared__ float4 shared[];
  const int slot = threadIdx.x / T, t = threadIdx.x % T;
  float2* s = (float2*)shared + slot * SIGNAL;
  float2* kept = (float2*)shared + SIGNALS * SIGNAL + threadIdx.x;
  const unsigned blocks = ((unsigned)channels + SIGNALS - 1) / SIGNALS, share = blockIdx.x / blocks;
  const Start channel = start((blockIdx.x - share * blocks) * SIGNALS + slot, channels, channels, 0, 1);
  x += channel.offset * x_channel;
  y += channel.offset * y_channel;
  const Rows rows(t);
  RowPair sum = {};
  const i64 count = images * tiles, last = count * (share + 1) / shares;
  for (i64 number = count * share / shares; number < last; ++number) {
    const i64 image = number / tiles;
    const int begin = (int)((number - image * tiles) * tile);
    const int end = y_length - begin < tile ? (int)y_length : begin + (int)tile;
    to_rows<PAIRED_FIRST>(x + image * x_image, {x_step, begin + (int)x_first, 0, (int)x_length}, t, s);
    RowPair r;
    rows_forward(s, rows, r);
#pragma unroll
    for (int i = 0; i < 2 * C; ++i) kept[i * SIGNALS * T] = r[i];
    __syncthreads();
    to_rows<PAIRED_SECOND>(y + image * y_image, {y_step, begin, begin, end}, t, s);
    rows_forward(s, rows, r);
    each_pair(t, [&](int i, int m, int, float2 turned) {
      float2 even, odd, low, high;
      halves(r[i], r[m], even, odd);
      pair_product<true>(kept[i * SIGNALS * T], kept[m * SIGNALS * T], even, odd, turned, low, high);
      sum[i] = add(sum[i], low);
      if (m != i) sum[m] = add(sum[m], high);
    });
    __syncthreads();
  }
  const float factor = 0.25f * (float)scale;
#pragma unroll
  for (int i = 0; i < 2 * C; ++i) sum[i] = scaled(factor, sum[i]);
  rows_inverse(sum, rows, s);
  from_rows<PAIRED_RESULT>(s, t, w + share * w_share + channel.offset * w_channel,
                           {w_step, 0, 0, channel.exists ? (int)taps : 0});
}

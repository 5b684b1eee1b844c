// From signals and output gradients to gradients of filters; depthwise1d.cu says how.
//
// A block takes channels and a share of the images, tile by tile, sums the products of their spectra in registers and
// goes back once. Of the threads one half takes a signal to its rows, the other one its output gradient; then each
// thread has the same two rows of both.

extern "C" __global__ void BOUNDS depthwise1d_gradient(const Real* __restrict__ x, const Real* __restrict__ y,
                                                       Result* __restrict__ w, i64 channels, i64 images, i64 tiles,
                                                       i64 shares, i64 tile, i64 x_channel, i64 x_image, i64 x_step,
                                                       i64 x_length, i64 x_first, i64 y_channel, i64 y_image,
                                                       i64 y_step, i64 y_length, i64 w_share, i64 w_channel,
                                                       i64 w_step, i64 taps, double scale) {
  extern __shared__ float4 shared[];
  const int slot = threadIdx.x / T, t = threadIdx.x % T, half = t / (T / 2);
  float2 *s = (float2*)shared + slot * SIGNAL, *other = s + SIGNALS * SIGNAL;
  const unsigned blocks = ((unsigned)channels + SIGNALS - 1) / SIGNALS, share = blockIdx.x / blocks;
  const Start channel = start((blockIdx.x - share * blocks) * SIGNALS + slot, channels, channels, 0, 1);
  const Real* from = half ? y + channel.offset * y_channel : x + channel.offset * x_channel;
  const Rows rows(t);
  RowPair sum = {};
  const i64 count = images * tiles, last = count * (share + 1) / shares;
  for (i64 number = count * share / shares; number < last; ++number) {
    const i64 image = number / tiles;
    const int begin = (int)((number - image * tiles) * tile);
    const int end = y_length - begin < tile ? (int)y_length : begin + (int)tile;
    const int place = begin * APART_SECOND;
    const Span span = half ? Span{y_step, place, begin, end, true}
                           : Span{x_step, place + (int)x_first, 0, (int)x_length, false};
    to_rows<PAIRED_FIRST && (PAIRED_SECOND || APART_SECOND > 1), APART_SECOND>(
        from + image * (half ? y_image : x_image), span, t % (T / 2), T / 2, half ? other : s);
    RowPair p, q;
    rows_forward(s, rows, p);
    rows_forward(other, rows, q);
    each_pair(t, [&](int i, int m, int, float2 w) {
      float2 even, odd, low, high;
      halves(q[i], q[m], even, odd);
      pair_product<true>(p[i], p[m], even, odd, w, low, high);
      sum[i] = add(sum[i], low);
      if (m != i) sum[m] = add(sum[m], high);
    });
    __syncthreads();
  }
  const float factor = 0.25f * (float)scale;
#pragma unroll
  for (int i = 0; i < 2 * C; ++i) sum[i] = scaled(factor, sum[i]);
  rows_inverse(sum, rows, s);
  from_rows<PAIRED_RESULT, APART_RESULT>(s, t, w + share * w_share + channel.offset * w_channel,
                                         {w_step, 0, 0, channel.exists ? (int)taps : 0});
}

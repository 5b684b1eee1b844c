"""Messages of the parameters of Caffe's layers: the fields' names, numbers, types and defaults.

:mod:`~tilewise.frontends.caffe.schema.build` says how a table is read.
"""

from __future__ import annotations

__all__ = ["LAYERS"]

LAYERS = """
AccuracyParameter
  top_k:1:uint32=1 axis:2:int32=1 ignore_label:3:int32

ArgMaxParameter
  out_max_val:1:bool top_k:2:uint32=1 axis:3:int32

BatchNormParameter
  use_global_stats:1:bool moving_average_fraction:2:float=0.999 eps:3:float=1e-05

BiasParameter
  axis:1:int32=1 num_axes:2:int32=1 filler:3:FillerParameter

ClipParameter
  min:1:float max:2:float

ConcatParameter
  concat_dim:1:uint32=1 axis:2:int32=1

ContrastiveLossParameter
  margin:1:float=1 legacy_version:2:bool

ConvolutionParameter
  num_output:1:uint32 bias_term:2:bool=true pad:3:uint32* kernel_size:4:uint32* group:5:uint32=1 stride:6:uint32*
  weight_filler:7:FillerParameter bias_filler:8:FillerParameter pad_h:9:uint32 pad_w:10:uint32 kernel_h:11:uint32
  kernel_w:12:uint32 stride_h:13:uint32 stride_w:14:uint32 engine:15:Engine=DEFAULT axis:16:int32=1
  force_nd_im2col:17:bool dilation:18:uint32*
  enum Engine: DEFAULT:0 CAFFE:1 CUDNN:2

CropParameter
  axis:1:int32=2 offset:2:uint32*

DataParameter
  source:1:string scale:2:float=1 mean_file:3:string batch_size:4:uint32 crop_size:5:uint32 mirror:6:bool
  rand_skip:7:uint32 backend:8:DB=LEVELDB force_encoded_color:9:bool prefetch:10:uint32=4
  enum DB: LEVELDB:0 LMDB:1

DropoutParameter
  dropout_ratio:1:float=0.5

DummyDataParameter
  data_filler:1:FillerParameter* num:2:uint32* channels:3:uint32* height:4:uint32* width:5:uint32* shape:6:BlobShape*

EltwiseParameter
  operation:1:EltwiseOp=SUM coeff:2:float* stable_prod_grad:3:bool=true
  enum EltwiseOp: PROD:0 SUM:1 MAX:2

ELUParameter
  alpha:1:float=1

EmbedParameter
  num_output:1:uint32 input_dim:2:uint32 bias_term:3:bool=true weight_filler:4:FillerParameter
  bias_filler:5:FillerParameter

ExpParameter
  base:1:float=-1 scale:2:float=1 shift:3:float

FlattenParameter
  axis:1:int32=1 end_axis:2:int32=-1

HDF5DataParameter
  source:1:string batch_size:2:uint32 shuffle:3:bool

HDF5OutputParameter
  file_name:1:string

HingeLossParameter
  norm:1:Norm=L1
  enum Norm: L1:1 L2:2

ImageDataParameter
  source:1:string scale:2:float=1 mean_file:3:string batch_size:4:uint32=1 crop_size:5:uint32 mirror:6:bool
  rand_skip:7:uint32 shuffle:8:bool new_height:9:uint32 new_width:10:uint32 is_color:11:bool=true root_folder:12:string

InfogainLossParameter
  source:1:string axis:2:int32=1

InnerProductParameter
  num_output:1:uint32 bias_term:2:bool=true weight_filler:3:FillerParameter bias_filler:4:FillerParameter axis:5:int32=1
  transpose:6:bool

InputParameter
  shape:1:BlobShape*

LogParameter
  base:1:float=-1 scale:2:float=1 shift:3:float

LossParameter
  ignore_label:1:int32 normalize:2:bool normalization:3:NormalizationMode=VALID
  enum NormalizationMode: FULL:0 VALID:1 BATCH_SIZE:2 NONE:3

LRNParameter
  local_size:1:uint32=5 alpha:2:float=1 beta:3:float=0.75 norm_region:4:NormRegion=ACROSS_CHANNELS k:5:float=1
  engine:6:Engine=DEFAULT
  enum NormRegion: ACROSS_CHANNELS:0 WITHIN_CHANNEL:1
  enum Engine: DEFAULT:0 CAFFE:1 CUDNN:2

MemoryDataParameter
  batch_size:1:uint32 channels:2:uint32 height:3:uint32 width:4:uint32

MVNParameter
  normalize_variance:1:bool=true across_channels:2:bool eps:3:float=1e-09

ParameterParameter
  shape:1:BlobShape

PoolingParameter
  pool:1:PoolMethod=MAX kernel_size:2:uint32 stride:3:uint32=1 pad:4:uint32 kernel_h:5:uint32 kernel_w:6:uint32
  stride_h:7:uint32 stride_w:8:uint32 pad_h:9:uint32 pad_w:10:uint32 engine:11:Engine=DEFAULT global_pooling:12:bool
  round_mode:13:RoundMode=CEIL
  enum PoolMethod: MAX:0 AVE:1 STOCHASTIC:2
  enum Engine: DEFAULT:0 CAFFE:1 CUDNN:2
  enum RoundMode: CEIL:0 FLOOR:1

PowerParameter
  power:1:float=1 scale:2:float=1 shift:3:float

PReLUParameter
  filler:1:FillerParameter channel_shared:2:bool

PythonParameter
  module:1:string layer:2:string param_str:3:string share_in_parallel:4:bool

RecurrentParameter
  num_output:1:uint32 weight_filler:2:FillerParameter bias_filler:3:FillerParameter debug_info:4:bool
  expose_hidden:5:bool

ReductionParameter
  operation:1:ReductionOp=SUM axis:2:int32 coeff:3:float=1
  enum ReductionOp: SUM:1 ASUM:2 SUMSQ:3 MEAN:4

ReLUParameter
  negative_slope:1:float engine:2:Engine=DEFAULT
  enum Engine: DEFAULT:0 CAFFE:1 CUDNN:2

ReshapeParameter
  shape:1:BlobShape axis:2:int32 num_axes:3:int32=-1

ScaleParameter
  axis:1:int32=1 num_axes:2:int32=1 filler:3:FillerParameter bias_term:4:bool bias_filler:5:FillerParameter

SigmoidParameter
  engine:1:Engine=DEFAULT
  enum Engine: DEFAULT:0 CAFFE:1 CUDNN:2

SliceParameter
  slice_dim:1:uint32=1 slice_point:2:uint32* axis:3:int32=1

SoftmaxParameter
  engine:1:Engine=DEFAULT axis:2:int32=1
  enum Engine: DEFAULT:0 CAFFE:1 CUDNN:2

SPPParameter
  pyramid_height:1:uint32 pool:2:PoolMethod=MAX engine:6:Engine=DEFAULT
  enum PoolMethod: MAX:0 AVE:1 STOCHASTIC:2
  enum Engine: DEFAULT:0 CAFFE:1 CUDNN:2

SwishParameter
  beta:1:float=1

TanHParameter
  engine:1:Engine=DEFAULT
  enum Engine: DEFAULT:0 CAFFE:1 CUDNN:2

ThresholdParameter
  threshold:1:float

TileParameter
  axis:1:int32=1 tiles:2:int32

TransformationParameter
  scale:1:float=1 mirror:2:bool crop_size:3:uint32 mean_file:4:string mean_value:5:float* force_color:6:bool
  force_gray:7:bool

WindowDataParameter
  source:1:string scale:2:float=1 mean_file:3:string batch_size:4:uint32 crop_size:5:uint32 mirror:6:bool
  fg_threshold:7:float=0.5 bg_threshold:8:float=0.5 fg_fraction:9:float=0.25 context_pad:10:uint32
  crop_mode:11:string=warp cache_images:12:bool root_folder:13:string
"""

"""Messages of networks, solvers, blobs and data as Caffe writes them: the fields' names, numbers, types and defaults.

:mod:`~tilewise.frontends.caffe.schema.build` says how a table is read.
"""

from __future__ import annotations

__all__ = ["NETS"]

NETS = """
enum Phase: TRAIN:0 TEST:1

BlobShape
  dim:1:int64#

BlobProto
  num:1:int32 channels:2:int32 height:3:int32 width:4:int32 data:5:float# diff:6:float# shape:7:BlobShape
  double_data:8:double# double_diff:9:double#

BlobProtoVector
  blobs:1:BlobProto*

Datum
  channels:1:int32 height:2:int32 width:3:int32 data:4:bytes label:5:int32 float_data:6:float* encoded:7:bool

FillerParameter
  type:1:string=constant value:2:float min:3:float max:4:float=1 mean:5:float std:6:float=1 sparse:7:int32=-1
  variance_norm:8:VarianceNorm=FAN_IN
  enum VarianceNorm: FAN_IN:0 FAN_OUT:1 AVERAGE:2

NetParameter
  name:1:string layers:2:V1LayerParameter* input:3:string* input_dim:4:int32* force_backward:5:bool state:6:NetState
  debug_info:7:bool input_shape:8:BlobShape* layer:100:LayerParameter*

NetState
  phase:1:Phase=TEST level:2:int32 stage:3:string*

NetStateRule
  phase:1:Phase min_level:2:int32 max_level:3:int32 stage:4:string* not_stage:5:string*

ParamSpec
  name:1:string share_mode:2:DimCheckMode lr_mult:3:float=1 decay_mult:4:float=1
  enum DimCheckMode: STRICT:0 PERMISSIVE:1

SolverParameter
  train_net:1:string test_net:2:string* test_iter:3:int32* test_interval:4:int32 base_lr:5:float display:6:int32
  max_iter:7:int32 lr_policy:8:string gamma:9:float power:10:float momentum:11:float weight_decay:12:float
  stepsize:13:int32 snapshot:14:int32 snapshot_prefix:15:string snapshot_diff:16:bool solver_mode:17:SolverMode=GPU
  device_id:18:int32 test_compute_loss:19:bool random_seed:20:int64=-1 train_net_param:21:NetParameter
  test_net_param:22:NetParameter* debug_info:23:bool net:24:string net_param:25:NetParameter train_state:26:NetState
  test_state:27:NetState* snapshot_after_train:28:bool=true regularization_type:29:string=L2
  solver_type:30:SolverType=SGD delta:31:float=1e-08 test_initialization:32:bool=true average_loss:33:int32=1
  stepvalue:34:int32* clip_gradients:35:float=-1 iter_size:36:int32=1 snapshot_format:37:SnapshotFormat=BINARYPROTO
  rms_decay:38:float=0.99 momentum2:39:float=0.999 type:40:string=SGD layer_wise_reduce:41:bool=true weights:42:string*
  enum SnapshotFormat: HDF5:0 BINARYPROTO:1
  enum SolverMode: CPU:0 GPU:1
  enum SolverType: SGD:0 NESTEROV:1 ADAGRAD:2 RMSPROP:3 ADADELTA:4 ADAM:5

SolverState
  iter:1:int32 learned_net:2:string history:3:BlobProto* current_step:4:int32

LayerParameter
  name:1:string type:2:string bottom:3:string* top:4:string* loss_weight:5:float* param:6:ParamSpec* blobs:7:BlobProto*
  include:8:NetStateRule* exclude:9:NetStateRule* phase:10:Phase propagate_down:11:bool*
  transform_param:100:TransformationParameter loss_param:101:LossParameter accuracy_param:102:AccuracyParameter
  argmax_param:103:ArgMaxParameter concat_param:104:ConcatParameter contrastive_loss_param:105:ContrastiveLossParameter
  convolution_param:106:ConvolutionParameter data_param:107:DataParameter dropout_param:108:DropoutParameter
  dummy_data_param:109:DummyDataParameter eltwise_param:110:EltwiseParameter exp_param:111:ExpParameter
  hdf5_data_param:112:HDF5DataParameter hdf5_output_param:113:HDF5OutputParameter
  hinge_loss_param:114:HingeLossParameter image_data_param:115:ImageDataParameter
  infogain_loss_param:116:InfogainLossParameter inner_product_param:117:InnerProductParameter lrn_param:118:LRNParameter
  memory_data_param:119:MemoryDataParameter mvn_param:120:MVNParameter pooling_param:121:PoolingParameter
  power_param:122:PowerParameter relu_param:123:ReLUParameter sigmoid_param:124:SigmoidParameter
  softmax_param:125:SoftmaxParameter slice_param:126:SliceParameter tanh_param:127:TanHParameter
  threshold_param:128:ThresholdParameter window_data_param:129:WindowDataParameter python_param:130:PythonParameter
  prelu_param:131:PReLUParameter spp_param:132:SPPParameter reshape_param:133:ReshapeParameter
  log_param:134:LogParameter flatten_param:135:FlattenParameter reduction_param:136:ReductionParameter
  embed_param:137:EmbedParameter tile_param:138:TileParameter batch_norm_param:139:BatchNormParameter
  elu_param:140:ELUParameter bias_param:141:BiasParameter scale_param:142:ScaleParameter input_param:143:InputParameter
  crop_param:144:CropParameter parameter_param:145:ParameterParameter recurrent_param:146:RecurrentParameter
  swish_param:147:SwishParameter clip_param:148:ClipParameter

V1LayerParameter
  layer:1:V0LayerParameter bottom:2:string* top:3:string* name:4:string type:5:LayerType blobs:6:BlobProto*
  blobs_lr:7:float* weight_decay:8:float* concat_param:9:ConcatParameter convolution_param:10:ConvolutionParameter
  data_param:11:DataParameter dropout_param:12:DropoutParameter hdf5_data_param:13:HDF5DataParameter
  hdf5_output_param:14:HDF5OutputParameter image_data_param:15:ImageDataParameter
  infogain_loss_param:16:InfogainLossParameter inner_product_param:17:InnerProductParameter lrn_param:18:LRNParameter
  pooling_param:19:PoolingParameter window_data_param:20:WindowDataParameter power_param:21:PowerParameter
  memory_data_param:22:MemoryDataParameter argmax_param:23:ArgMaxParameter eltwise_param:24:EltwiseParameter
  threshold_param:25:ThresholdParameter dummy_data_param:26:DummyDataParameter accuracy_param:27:AccuracyParameter
  hinge_loss_param:29:HingeLossParameter relu_param:30:ReLUParameter slice_param:31:SliceParameter
  include:32:NetStateRule* exclude:33:NetStateRule* mvn_param:34:MVNParameter loss_weight:35:float*
  transform_param:36:TransformationParameter tanh_param:37:TanHParameter sigmoid_param:38:SigmoidParameter
  softmax_param:39:SoftmaxParameter contrastive_loss_param:40:ContrastiveLossParameter exp_param:41:ExpParameter
  loss_param:42:LossParameter param:1001:string* blob_share_mode:1002:DimCheckMode*
  enum LayerType: NONE:0 ABSVAL:35 ACCURACY:1 ARGMAX:30 BNLL:2 CONCAT:3 CONTRASTIVE_LOSS:37 CONVOLUTION:4 DATA:5
      DECONVOLUTION:39 DROPOUT:6 DUMMY_DATA:32 EUCLIDEAN_LOSS:7 ELTWISE:25 EXP:38 FLATTEN:8 HDF5_DATA:9 HDF5_OUTPUT:10
      HINGE_LOSS:28 IM2COL:11 IMAGE_DATA:12 INFOGAIN_LOSS:13 INNER_PRODUCT:14 LRN:15 MEMORY_DATA:29
      MULTINOMIAL_LOGISTIC_LOSS:16 MVN:34 POOLING:17 POWER:26 RELU:18 SIGMOID:19 SIGMOID_CROSS_ENTROPY_LOSS:27
      SILENCE:36 SOFTMAX:20 SOFTMAX_LOSS:21 SPLIT:22 SLICE:33 TANH:23 WINDOW_DATA:24 THRESHOLD:31
  enum DimCheckMode: STRICT:0 PERMISSIVE:1

V0LayerParameter
  name:1:string type:2:string num_output:3:uint32 biasterm:4:bool=true weight_filler:5:FillerParameter
  bias_filler:6:FillerParameter pad:7:uint32 kernelsize:8:uint32 group:9:uint32=1 stride:10:uint32=1
  pool:11:PoolMethod=MAX dropout_ratio:12:float=0.5 local_size:13:uint32=5 alpha:14:float=1 beta:15:float=0.75
  source:16:string scale:17:float=1 meanfile:18:string batchsize:19:uint32 cropsize:20:uint32 mirror:21:bool
  k:22:float=1 blobs:50:BlobProto* blobs_lr:51:float* weight_decay:52:float* rand_skip:53:uint32
  det_fg_threshold:54:float=0.5 det_bg_threshold:55:float=0.5 det_fg_fraction:56:float=0.25 det_context_pad:58:uint32
  det_crop_mode:59:string=warp new_num:60:int32 new_channels:61:int32 new_height:62:int32 new_width:63:int32
  shuffle_images:64:bool concat_dim:65:uint32=1 hdf5_output_param:1001:HDF5OutputParameter
  enum PoolMethod: MAX:0 AVE:1 STOCHASTIC:2
"""

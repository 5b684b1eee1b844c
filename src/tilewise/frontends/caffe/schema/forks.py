"""What forks of Caffe add to its messages, a table for each fork.

Forks gave the same numbers to different fields: 143 is ``input_param`` in Caffe and ``interp_param`` in PSPNet. In text
fields go by name, so text may mix all of them.

:mod:`~tilewise.frontends.caffe.schema.build` says how a table is read.
"""

from __future__ import annotations

__all__ = ["FORKS"]

SSD = """
AnnotatedDataParameter
  batch_sampler:1:BatchSampler* label_map_file:2:string anno_type:3:AnnotatedDatum.AnnotationType

AnnotatedDatum
  datum:1:Datum type:2:AnnotationType annotation_group:3:AnnotationGroup*
  enum AnnotationType: BBOX:0

Annotation
  instance_id:1:int32 bbox:2:NormalizedBBox

AnnotationGroup
  group_label:1:int32 annotation:2:Annotation*

BatchSampler
  use_original_image:1:bool=true sampler:2:Sampler sample_constraint:3:SampleConstraint max_sample:4:uint32
  max_trials:5:uint32=100

DetectionEvaluateParameter
  num_classes:1:uint32 background_label_id:2:uint32 overlap_threshold:3:float=0.5 evaluate_difficult_gt:4:bool=true
  name_size_file:5:string resize_param:6:ResizeParameter

DetectionOutputParameter
  num_classes:1:uint32 share_location:2:bool=true background_label_id:3:int32 nms_param:4:NonMaximumSuppressionParameter
  save_output_param:5:SaveOutputParameter code_type:6:PriorBoxParameter.CodeType=CORNER keep_top_k:7:int32=-1
  variance_encoded_in_target:8:bool confidence_threshold:9:float visualize:10:bool visualize_threshold:11:float
  save_file:12:string

DistortionParameter
  brightness_prob:1:float brightness_delta:2:float contrast_prob:3:float contrast_lower:4:float contrast_upper:5:float
  hue_prob:6:float hue_delta:7:float saturation_prob:8:float saturation_lower:9:float saturation_upper:10:float
  random_order_prob:11:float

EmitConstraint
  emit_type:1:EmitType=CENTER emit_overlap:2:float
  enum EmitType: CENTER:0 MIN_OVERLAP:1

ExpansionParameter
  prob:1:float=1 max_expand_ratio:2:float=1

LabelMap
  item:1:LabelMapItem*

LabelMapItem
  name:1:string label:2:int32 display_name:3:string

LayerParameter
  annotated_data_param:200:AnnotatedDataParameter multibox_loss_param:201:MultiBoxLossParameter
  permute_param:202:PermuteParameter prior_box_param:203:PriorBoxParameter
  detection_output_param:204:DetectionOutputParameter detection_evaluate_param:205:DetectionEvaluateParameter
  norm_param:206:NormalizeParameter video_data_param:207:VideoDataParameter

MultiBoxLossParameter
  loc_loss_type:1:LocLossType=SMOOTH_L1 conf_loss_type:2:ConfLossType=SOFTMAX loc_weight:3:float=1 num_classes:4:uint32
  share_location:5:bool=true match_type:6:MatchType=PER_PREDICTION overlap_threshold:7:float=0.5
  use_prior_for_matching:8:bool=true background_label_id:9:uint32 use_difficult_gt:10:bool=true do_neg_mining:11:bool
  neg_pos_ratio:12:float=3 neg_overlap:13:float=0.5 code_type:14:PriorBoxParameter.CodeType=CORNER
  encode_variance_in_target:16:bool map_object_to_agnostic:17:bool ignore_cross_boundary_bbox:18:bool bp_inside:19:bool
  mining_type:20:MiningType=MAX_NEGATIVE nms_param:21:NonMaximumSuppressionParameter sample_size:22:int32=64
  use_prior_for_nms:23:bool
  enum LocLossType: L2:0 SMOOTH_L1:1
  enum ConfLossType: SOFTMAX:0 LOGISTIC:1
  enum MatchType: BIPARTITE:0 PER_PREDICTION:1
  enum MiningType: NONE:0 MAX_NEGATIVE:1 HARD_EXAMPLE:2

NoiseParameter
  prob:1:float hist_eq:2:bool inverse:3:bool decolorize:4:bool gauss_blur:5:bool jpeg:6:float=-1 posterize:7:bool
  erode:8:bool saltpepper:9:bool saltpepper_param:10:SaltPepperParameter clahe:11:bool convert_to_hsv:12:bool
  convert_to_lab:13:bool

NonMaximumSuppressionParameter
  nms_threshold:1:float=0.3 top_k:2:int32 eta:3:float=1

NormalizeParameter
  across_spatial:1:bool=true scale_filler:2:FillerParameter channel_shared:3:bool=true eps:4:float=1e-10

NormalizedBBox
  xmin:1:float ymin:2:float xmax:3:float ymax:4:float label:5:int32 difficult:6:bool score:7:float size:8:float

PermuteParameter
  order:1:uint32*

PriorBoxParameter
  min_size:1:float* max_size:2:float* aspect_ratio:3:float* flip:4:bool=true clip:5:bool variance:6:float*
  img_size:7:uint32 img_h:8:uint32 img_w:9:uint32 step:10:float step_h:11:float step_w:12:float offset:13:float=0.5
  enum CodeType: CORNER:1 CENTER_SIZE:2 CORNER_SIZE:3

ResizeParameter
  prob:1:float=1 resize_mode:2:Resize_mode=WARP height:3:uint32 width:4:uint32 pad_mode:5:Pad_mode=CONSTANT
  pad_value:6:float* interp_mode:7:Interp_mode* height_scale:8:uint32 width_scale:9:uint32
  enum Resize_mode: WARP:1 FIT_SMALL_SIZE:2 FIT_LARGE_SIZE_AND_PAD:3
  enum Pad_mode: CONSTANT:1 MIRRORED:2 REPEAT_NEAREST:3
  enum Interp_mode: LINEAR:1 AREA:2 NEAREST:3 CUBIC:4 LANCZOS4:5

SaltPepperParameter
  fraction:1:float value:2:float*

SampleConstraint
  min_jaccard_overlap:1:float max_jaccard_overlap:2:float min_sample_coverage:3:float max_sample_coverage:4:float
  min_object_coverage:5:float max_object_coverage:6:float

Sampler
  min_scale:1:float=1 max_scale:2:float=1 min_aspect_ratio:3:float=1 max_aspect_ratio:4:float=1

SaveOutputParameter
  output_directory:1:string output_name_prefix:2:string output_format:3:string label_map_file:4:string
  name_size_file:5:string num_test_image:6:uint32 resize_param:7:ResizeParameter

SolverParameter
  eval_type:41:string=classification ap_version:42:string=Integral plateau_winsize:43:int32*
  show_per_class_result:44:bool

SolverState
  minimum_loss:5:float=1e+38 iter_last_event:6:int32

TransformationParameter
  resize_param:8:ResizeParameter noise_param:9:NoiseParameter emit_constraint:10:EmitConstraint crop_h:11:uint32
  crop_w:12:uint32 distort_param:13:DistortionParameter expand_param:14:ExpansionParameter

VideoDataParameter
  video_type:1:VideoType=WEBCAM device_id:2:int32 video_file:3:string skip_frames:4:uint32
  enum VideoType: WEBCAM:0 VIDEO:1
"""
"""Single-shot detection (weiliu89/caffe, branch ssd)."""

SEGNET = """
BNParameter
  scale_filler:1:FillerParameter shift_filler:2:FillerParameter bn_mode:3:BNMode=LEARN
  enum BNMode: LEARN:0 INFERENCE:1

DenseImageDataParameter
  source:1:string batch_size:2:uint32 rand_skip:3:uint32 shuffle:4:bool new_height:5:uint32 new_width:6:uint32
  is_color:7:bool=true mean_file:8:string root_folder:9:string mirror:10:bool crop_width:11:uint32 crop_height:12:uint32

DropoutParameter
  sample_weights_test:2:bool

LayerParameter
  bn_param:45:BNParameter upsample_param:137:UpsampleParameter dense_image_data_param:138:DenseImageDataParameter

LossParameter
  weight_by_label_freqs:3:bool class_weighting:4:float*

UpsampleParameter
  scale:1:uint32=2 scale_h:2:uint32 scale_w:3:uint32 pad_out_h:4:bool pad_out_w:5:bool upsample_h:6:uint32
  upsample_w:7:uint32
"""
"""SegNet (alexgkendall/caffe-segnet)."""

PSPNET = """
BNParameter
  slope_filler:1:FillerParameter bias_filler:2:FillerParameter momentum:3:float=0.9 eps:4:float=1e-05 frozen:5:bool
  engine:6:Engine=DEFAULT
  enum Engine: DEFAULT:0 CAFFE:1 CUDNN:2

BatchNormParameter
  update_global_stats:4:bool

ImageDataParameter
  ignore_label:15:int32=255 label_type:16:LabelType=IMAGE
  enum LabelType: NONE:0 IMAGE:1 PIXEL:2

InterpParameter
  height:1:int32 width:2:int32 zoom_factor:3:int32=1 shrink_factor:4:int32=1 pad_beg:5:int32 pad_end:6:int32

LayerParameter
  interp_param:143:InterpParameter seg_accuracy_param:144:SegAccuracyParameter bn_param:152:BNParameter

SegAccuracyParameter
  metric:1:AccuracyMetric=PixelAccuracy ignore_label:2:int32* reset:3:bool=true
  enum AccuracyMetric: PixelAccuracy:0 ClassAccuracy:1 PixelIOU:2

TransformationParameter
  scale_factors:8:float* crop_width:9:uint32 crop_height:10:uint32
"""
"""PSPNet and DeepLab (hszhao/PSPNet)."""

RCNN = """
DropoutParameter
  scale_train:2:bool=true

LayerParameter
  roi_pooling_param:8266711:ROIPoolingParameter smooth_l1_loss_param:8266712:SmoothL1LossParameter

ROIPoolingParameter
  pooled_h:1:uint32 pooled_w:2:uint32 spatial_scale:3:float=1

SmoothL1LossParameter
  sigma:1:float=1
"""
"""Fast and Faster R-CNN (rbgirshick/caffe-fast-rcnn)."""

SHUFFLENET = """
LayerParameter
  shuffle_channel_param:164:ShuffleChannelParameter

ShuffleChannelParameter
  group:1:uint32=1
"""
"""ShuffleNet (farmingyard/ShuffleNet)."""

RELU6 = """
LayerParameter
  relu6_param:100000:ReLU6Parameter

ReLU6Parameter
  negative_slope:1:float
"""
"""MobileNetV2's ReLU6 layer."""

SPHEREFACE = """
LayerParameter
  margin_inner_product_param:151:MarginInnerProductParameter

MarginInnerProductParameter
  num_output:1:uint32 type:2:MarginType=SINGLE weight_filler:3:FillerParameter axis:4:int32=1 base:5:float=1
  gamma:6:float power:7:float=1 iteration:8:int32 lambda_min:9:float
  enum MarginType: SINGLE:0 DOUBLE:1 TRIPLE:2 QUADRUPLE:3
"""
"""SphereFace (wy1iu/sphereface)."""

FORKS = {
    "ssd": SSD,
    "segnet": SEGNET,
    "pspnet": PSPNET,
    "rcnn": RCNN,
    "shufflenet": SHUFFLENET,
    "relu6": RELU6,
    "sphereface": SPHEREFACE,
}
"""The tables by the name of their profile."""

// SPDX-License-Identifier: Apache-2.0
// The part of ONNX Runtime's (ORT's) C ABI that this provider uses. It is declared here because no
// package index has ORT's headers, and a source build would have to download them.
//
// ORT's ABI is append-only: a function keeps its position in the table, a member its position in
// the struct. Functions are declared here by their position (ordinal) and signature, under ORT's
// names, so that they are found in its documentation. tests/abi compares every ordinal, signature,
// layout and enumerator below with the official headers.
//
// The lowest supported ORT is 1.24 (API 24), the first that has all functions used here
// (GetTensorElementTypeAndShapeDataReference). The structs have the members up to API 27. Api
// (api.h) announces the lower of 27 and the runtime's version, since ORT reads struct members up to
// the announced version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

// Types that are only used through pointers. They are in the global namespace, as in ORT's headers,
// so that the comparison with those can be exact.
struct OrtApi;
struct OrtDataTransferImpl;
struct OrtEpApi;
struct OrtEnv;
struct OrtEpDevice;
struct OrtEpGraphSupportInfo;
struct OrtGraph;
struct OrtHardwareDevice;
struct OrtKernelContext;
struct OrtKeyValuePairs;
struct OrtLogger;
struct OrtModelEditorApi;
struct OrtNode;
struct OrtNodeComputeContext;
struct OrtOpAttr;
struct OrtProfilingEvent;
struct OrtProfilingEventsContainer;
struct OrtRunOptions;
struct OrtSession;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;
struct OrtValueInfo;
struct OrtExternalInitializerInfo;

namespace flownpu::ort {

inline constexpr std::uint32_t kLowestVersion = 24;
inline constexpr std::uint32_t kHighestVersion = 27;
// The first version that calls OrtEp::CreateProfiler, and the first that calls
// OrtEp::OnSessionInitializationEnd.
inline constexpr std::uint32_t kProfilerVersion = 25;
inline constexpr std::uint32_t kInitializationEndVersion = 27;

// The character type of paths: char on Linux, wchar_t (UTF-16) on Windows.
using PathCharacter = std::filesystem::path::value_type;

// Enumerators that are not used are left out; the values are ORT's.
enum OrtErrorCode : std::uint32_t {
  ORT_OK = 0,
  ORT_FAIL = 1,
  ORT_INVALID_ARGUMENT = 2,
  ORT_RUNTIME_EXCEPTION = 6,
};

enum OrtLoggingLevel : std::uint32_t {
  ORT_LOGGING_LEVEL_INFO = 1,
  ORT_LOGGING_LEVEL_WARNING = 2,
  ORT_LOGGING_LEVEL_FATAL = 4,
};

enum OrtHardwareDeviceType : std::uint32_t {
  OrtHardwareDeviceType_CPU = 0,
  OrtHardwareDeviceType_NPU = 2,
};

enum ONNXTensorElementDataType : std::uint32_t {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 = 2,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 = 3,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 = 6,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL = 9,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 = 16,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4 = 21,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4 = 22,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E8M0 = 26,
};

enum OrtOpAttrType : std::uint32_t {
  ORT_OP_ATTR_UNDEFINED = 0,
  ORT_OP_ATTR_INT = 1,
  ORT_OP_ATTR_INTS = 2,
  ORT_OP_ATTR_FLOAT = 3,
  ORT_OP_ATTR_FLOATS = 4,
  ORT_OP_ATTR_STRING = 5,
  ORT_OP_ATTR_TENSOR = 8,
};

enum OrtCompiledModelCompatibility : std::uint32_t {
  OrtCompiledModelCompatibility_EP_NOT_APPLICABLE = 0,
  OrtCompiledModelCompatibility_EP_SUPPORTED_OPTIMAL = 1,
  OrtCompiledModelCompatibility_EP_UNSUPPORTED = 3,
};

enum OrtProfilingEventCategory : std::uint32_t {
  OrtProfilingEventCategory_KERNEL = 2,
};

// ---------------------------------------------------------------------------------------------------------------------
// Structs that this provider fills in and ORT reads. Function slots that it leaves empty are
// declared as void*; ORT treats null as "not implemented".

struct OrtEp;
struct OrtEpFactory;

struct OrtNodeFusionOptions {
  std::uint32_t ort_version_supported = 0;
  bool drop_constant_initializers = false;
};

struct OrtNodeComputeInfo {
  std::uint32_t ort_version_supported = 0;
  OrtStatus* (*CreateState)(OrtNodeComputeInfo* self, OrtNodeComputeContext* context,
                            void** state) = nullptr;
  OrtStatus* (*Compute)(OrtNodeComputeInfo* self, void* state, OrtKernelContext* context) = nullptr;
  void (*ReleaseState)(OrtNodeComputeInfo* self, void* state) = nullptr;
};

struct OrtEpProfilerImpl {
  std::uint32_t ort_version_supported = 0;
  void (*Release)(OrtEpProfilerImpl* self) noexcept = nullptr;
  OrtStatus* (*StartProfiling)(OrtEpProfilerImpl* self, std::int64_t offset_ns) noexcept = nullptr;
  OrtStatus* (*StartEvent)(OrtEpProfilerImpl* self,
                           std::uint64_t correlation_id) noexcept = nullptr;
  OrtStatus* (*StopEvent)(OrtEpProfilerImpl* self, std::uint64_t correlation_id,
                          const OrtProfilingEvent* event) noexcept = nullptr;
  OrtStatus* (*EndProfiling)(OrtEpProfilerImpl* self,
                             OrtProfilingEventsContainer* events) noexcept = nullptr;
};

struct OrtEp {
  std::uint32_t ort_version_supported = 0;
  const char* (*GetName)(const OrtEp* self) noexcept = nullptr;
  OrtStatus* (*GetCapability)(OrtEp* self, const OrtGraph* graph,
                              OrtEpGraphSupportInfo* support) noexcept = nullptr;
  OrtStatus* (*Compile)(OrtEp* self, const OrtGraph** graphs, const OrtNode** fused_nodes,
                        std::size_t count, OrtNodeComputeInfo** compute_infos,
                        OrtNode** ep_context_nodes) noexcept = nullptr;
  void (*ReleaseNodeComputeInfos)(OrtEp* self, OrtNodeComputeInfo** compute_infos,
                                  std::size_t count) noexcept = nullptr;
  void* GetPreferredDataLayout = nullptr;
  void* ShouldConvertDataLayoutForOp = nullptr;
  void* SetDynamicOptions = nullptr;
  OrtStatus* (*OnRunStart)(OrtEp* self, const OrtRunOptions* options) noexcept = nullptr;
  OrtStatus* (*OnRunEnd)(OrtEp* self, const OrtRunOptions* options,
                         bool sync_stream) noexcept = nullptr;
  void* CreateAllocator = nullptr;
  void* CreateSyncStreamForDevice = nullptr;
  const char* (*GetCompiledModelCompatibilityInfo)(OrtEp* self,
                                                   const OrtGraph* graph) noexcept = nullptr;
  // API 24
  void* GetKernelRegistry = nullptr;
  void* IsConcurrentRunSupported = nullptr;
  // API 25
  void* Sync = nullptr;
  OrtStatus* (*CreateProfiler)(OrtEp* self, OrtEpProfilerImpl** profiler) noexcept = nullptr;
  // API 26
  void* IsGraphCaptureEnabled = nullptr;
  void* IsGraphCaptured = nullptr;
  void* ReplayGraph = nullptr;
  void* GetGraphCaptureNodeAssignmentPolicy = nullptr;
  void* GetAvailableResource = nullptr;
  // API 27
  OrtStatus* (*OnSessionInitializationEnd)(OrtEp* self) noexcept = nullptr;
  void* GetDefaultMemoryDevice = nullptr;
  void* ReleaseCapturedGraph = nullptr;
};

struct OrtEpFactory {
  std::uint32_t ort_version_supported = 0;
  const char* (*GetName)(const OrtEpFactory* self) noexcept = nullptr;
  const char* (*GetVendor)(const OrtEpFactory* self) noexcept = nullptr;
  OrtStatus* (*GetSupportedDevices)(OrtEpFactory* self, const OrtHardwareDevice* const* devices,
                                    std::size_t num_devices, OrtEpDevice** ep_devices,
                                    std::size_t max_ep_devices,
                                    std::size_t* num_ep_devices) noexcept = nullptr;
  OrtStatus* (*CreateEp)(OrtEpFactory* self, const OrtHardwareDevice* const* devices,
                         const OrtKeyValuePairs* const* metadata, std::size_t num_devices,
                         const OrtSessionOptions* session_options, const OrtLogger* logger,
                         OrtEp** ep) noexcept = nullptr;
  void (*ReleaseEp)(OrtEpFactory* self, OrtEp* ep) noexcept = nullptr;
  // ORT's device selection policies call it without checking for null (seen in 1.31.1).
  std::uint32_t (*GetVendorId)(const OrtEpFactory* self) noexcept = nullptr;
  const char* (*GetVersion)(const OrtEpFactory* self) noexcept = nullptr;
  OrtStatus* (*ValidateCompiledModelCompatibilityInfo)(
      OrtEpFactory* self, const OrtHardwareDevice* const* devices, std::size_t num_devices,
      const char* compatibility, OrtCompiledModelCompatibility* result) noexcept = nullptr;
  void* CreateAllocator = nullptr;
  void* ReleaseAllocator = nullptr;
  // ORT calls this without checking for null, too, although this provider only uses the host's
  // memory.
  OrtStatus* (*CreateDataTransfer)(OrtEpFactory* self,
                                   OrtDataTransferImpl** transfer) noexcept = nullptr;
  void* IsStreamAware = nullptr;
  void* CreateSyncStreamForDevice = nullptr;
  // API 24
  void* GetHardwareDeviceIncompatibilityDetails = nullptr;
  void* CreateExternalResourceImporterForDevice = nullptr;
  void* GetNumCustomOpDomains = nullptr;
  void* GetCustomOpDomains = nullptr;
  // API 25
  void* InitGraphicsInterop = nullptr;
  void* DeinitGraphicsInterop = nullptr;
};

// ---------------------------------------------------------------------------------------------------------------------
// The functions of ORT that this provider calls, by their position in ORT's tables.

struct OrtApiBase {
  const OrtApi* (*GetApi)(std::uint32_t version) noexcept;
  const char* (*GetVersionString)() noexcept;
};

template <typename Table, typename Signature>
struct Function {
  std::size_t ordinal;
};
template <typename Signature>
using ApiFunction = Function<OrtApi, Signature>;
template <typename Signature>
using EpApiFunction = Function<OrtEpApi, Signature>;
template <typename Signature>
using ModelEditorApiFunction = Function<OrtModelEditorApi, Signature>;

// clang-format off: one function a line.
inline constexpr ApiFunction<OrtStatus*(OrtErrorCode code, const char* message)> CreateStatus{0};
inline constexpr ApiFunction<const char*(const OrtStatus* status)> GetErrorMessage{2};
inline constexpr ApiFunction<void(OrtStatus* status)> ReleaseStatus{93};

inline constexpr ApiFunction<OrtStatus*(OrtLoggingLevel level, const char* name, OrtEnv** environment)> CreateEnv{3};
inline constexpr ApiFunction<void(OrtEnv* environment)> ReleaseEnv{92};
inline constexpr ApiFunction<OrtStatus*(OrtSessionOptions** options)> CreateSessionOptions{10};
inline constexpr ApiFunction<OrtStatus*(OrtSessionOptions* options, int threads)> SetIntraOpNumThreads{24};
inline constexpr ApiFunction<OrtStatus*(OrtSessionOptions* options, int level)> SetSessionLogSeverityLevel{22};
inline constexpr ApiFunction<void(OrtSessionOptions* options)> ReleaseSessionOptions{100};
inline constexpr ApiFunction<OrtStatus*(OrtRunOptions** options)> CreateRunOptions{39};
inline constexpr ApiFunction<OrtStatus*(OrtRunOptions* options)> RunOptionsSetTerminate{46};
inline constexpr ApiFunction<void(OrtRunOptions* options)> ReleaseRunOptions{97};
inline constexpr ApiFunction<OrtStatus*(const OrtEnv* environment, const void* model, std::size_t bytes, const OrtSessionOptions* options, OrtSession** session)> CreateSessionFromArray{8};
inline constexpr ApiFunction<OrtStatus*(OrtSession* session, const OrtRunOptions* options, const char* const* input_names, const OrtValue* const* inputs, std::size_t num_inputs, const char* const* output_names, std::size_t num_outputs, OrtValue** outputs)> Run{9};
inline constexpr ApiFunction<void(OrtSession* session)> ReleaseSession{95};

inline constexpr ApiFunction<OrtStatus*(OrtValue* value, void** data)> GetTensorMutableData{51};
inline constexpr ApiFunction<OrtStatus*(const OrtValue* value, const void** data)> GetTensorData{378};
inline constexpr ApiFunction<void(OrtValue* value)> ReleaseValue{96};
inline constexpr ApiFunction<OrtStatus*(const OrtValue* value, ONNXTensorElementDataType* type, const std::int64_t** dims, std::size_t* rank)> GetTensorElementTypeAndShapeDataReference{414};

inline constexpr ApiFunction<OrtStatus*(const OrtTypeInfo* type, const OrtTensorTypeAndShapeInfo** tensor)> CastTypeInfoToTensorInfo{55};
inline constexpr ApiFunction<OrtStatus*(const OrtTensorTypeAndShapeInfo* info, ONNXTensorElementDataType* type)> GetTensorElementType{60};
inline constexpr ApiFunction<OrtStatus*(const OrtTensorTypeAndShapeInfo* info, std::size_t* rank)> GetDimensionsCount{61};
inline constexpr ApiFunction<OrtStatus*(const OrtTensorTypeAndShapeInfo* info, std::int64_t* dims, std::size_t rank)> GetDimensions{62};
inline constexpr ApiFunction<bool(const OrtTensorTypeAndShapeInfo* info)> TensorTypeAndShape_HasShape{390};

inline constexpr ApiFunction<OrtStatus*(const OrtKernelContext* context, std::size_t index, const OrtValue** value)> KernelContext_GetInput{90};
inline constexpr ApiFunction<OrtStatus*(OrtKernelContext* context, std::size_t index, const std::int64_t* dims, std::size_t rank, OrtValue** value)> KernelContext_GetOutput{91};
inline constexpr ApiFunction<OrtStatus*(const OrtKernelContext* context, void (*work)(void* data, std::size_t index), std::size_t total, std::size_t batches, void* data)> KernelContext_ParallelFor{274};

inline constexpr ApiFunction<OrtStatus*(const OrtLogger* logger, OrtLoggingLevel level, const char* message, const char* file, int line, const char* function)> Logger_LogMessage{247};

inline constexpr ApiFunction<OrtStatus*(const OrtValueInfo* value, const char** name)> GetValueInfoName{289};
inline constexpr ApiFunction<OrtStatus*(const OrtValueInfo* value, const OrtTypeInfo** type)> GetValueInfoTypeInfo{290};
inline constexpr ApiFunction<OrtStatus*(const OrtValueInfo* value, const OrtValue** initializer)> ValueInfo_GetInitializerValue{326};
inline constexpr ApiFunction<OrtStatus*(const OrtValueInfo* value, bool* is_constant)> ValueInfo_IsConstantInitializer{331};
inline constexpr ApiFunction<OrtStatus*(const OrtValueInfo* value, OrtExternalInitializerInfo** info)> ValueInfo_GetExternalInitializerInfo{327};
inline constexpr ApiFunction<void(OrtExternalInitializerInfo* info)> ReleaseExternalInitializerInfo{369};
inline constexpr ApiFunction<const PathCharacter*(const OrtExternalInitializerInfo* info)> ExternalInitializerInfo_GetFilePath{370};
inline constexpr ApiFunction<std::int64_t(const OrtExternalInitializerInfo* info)> ExternalInitializerInfo_GetFileOffset{371};
inline constexpr ApiFunction<std::size_t(const OrtExternalInitializerInfo* info)> ExternalInitializerInfo_GetByteSize{372};

inline constexpr ApiFunction<void(OrtKeyValuePairs** pairs)> CreateKeyValuePairs{295};
inline constexpr ApiFunction<void(OrtKeyValuePairs* pairs, const char* key, const char* value)> AddKeyValuePair{296};
inline constexpr ApiFunction<void(const OrtKeyValuePairs* pairs, const char* const** keys, const char* const** values, std::size_t* count)> GetKeyValuePairs{298};
inline constexpr ApiFunction<void(OrtKeyValuePairs* pairs)> ReleaseKeyValuePairs{300};
inline constexpr ApiFunction<OrtStatus*(const OrtSessionOptions* options, OrtKeyValuePairs** entries)> GetSessionOptionsConfigEntries{379};

inline constexpr ApiFunction<OrtHardwareDeviceType(const OrtHardwareDevice* device)> HardwareDevice_Type{307};
inline constexpr ApiFunction<std::uint32_t(const OrtHardwareDevice* device)> HardwareDevice_VendorId{308};
inline constexpr ApiFunction<const OrtEpApi*()> GetEpApi{317};
inline constexpr ApiFunction<const OrtModelEditorApi*()> GetModelEditorApi{291};

inline constexpr ApiFunction<OrtStatus*(const OrtGraph* graph, const PathCharacter** path)> Graph_GetModelPath{334};
inline constexpr ApiFunction<OrtStatus*(const OrtGraph* graph, std::size_t* count)> Graph_GetNumOperatorSets{336};
inline constexpr ApiFunction<OrtStatus*(const OrtGraph* graph, const char** domains, std::int64_t* versions, std::size_t count)> Graph_GetOperatorSets{337};
inline constexpr ApiFunction<OrtStatus*(const OrtGraph* graph, std::size_t* count)> Graph_GetNumOutputs{340};
inline constexpr ApiFunction<OrtStatus*(const OrtGraph* graph, const OrtValueInfo** outputs, std::size_t count)> Graph_GetOutputs{341};
inline constexpr ApiFunction<OrtStatus*(const OrtGraph* graph, std::size_t* count)> Graph_GetNumNodes{344};
inline constexpr ApiFunction<OrtStatus*(const OrtGraph* graph, const OrtNode** nodes, std::size_t count)> Graph_GetNodes{345};
inline constexpr ApiFunction<OrtStatus*(const OrtGraph* graph, const OrtNode** node)> Graph_GetParentNode{346};

inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, std::size_t* number)> Node_GetId{348};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, const char** name)> Node_GetName{349};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, const char** type)> Node_GetOperatorType{350};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, const char** domain)> Node_GetDomain{351};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, int* version)> Node_GetSinceVersion{352};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, std::size_t* count)> Node_GetNumInputs{353};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, const OrtValueInfo** inputs, std::size_t count)> Node_GetInputs{354};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, std::size_t* count)> Node_GetNumOutputs{355};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, const OrtValueInfo** outputs, std::size_t count)> Node_GetOutputs{356};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, std::size_t* count)> Node_GetNumImplicitInputs{357};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, const OrtValueInfo** inputs, std::size_t count)> Node_GetImplicitInputs{358};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, std::size_t* count)> Node_GetNumAttributes{359};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, const OrtOpAttr** attributes, std::size_t count)> Node_GetAttributes{360};
inline constexpr ApiFunction<OrtStatus*(const OrtOpAttr* attribute, OrtValue** tensor)> OpAttr_GetTensorAttributeAsOrtValue{362};
inline constexpr ApiFunction<OrtStatus*(const OrtOpAttr* attribute, OrtOpAttrType* type)> OpAttr_GetType{363};
inline constexpr ApiFunction<OrtStatus*(const OrtOpAttr* attribute, const char** name)> OpAttr_GetName{364};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, std::size_t* count)> Node_GetNumSubgraphs{365};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, const OrtGraph** subgraphs, std::size_t count, const char** attribute_names)> Node_GetSubgraphs{366};
inline constexpr ApiFunction<OrtStatus*(const OrtNode* node, const char** provider)> Node_GetEpName{368};
inline constexpr ApiFunction<OrtStatus*(const OrtOpAttr* attribute, OrtOpAttrType type, void* data, std::size_t bytes, std::size_t* needed)> ReadOpAttr{272};

inline constexpr ApiFunction<OrtStatus*(const char* name, const void* data, int length, OrtOpAttrType type, OrtOpAttr** attribute)> CreateOpAttr{211};
inline constexpr ApiFunction<void(OrtOpAttr* attribute)> ReleaseOpAttr{212};
inline constexpr ModelEditorApiFunction<OrtStatus*(const char* op_type, const char* domain, const char* name, const char* const* inputs, std::size_t num_inputs, const char* const* outputs, std::size_t num_outputs, OrtOpAttr** attributes, std::size_t num_attributes, OrtNode** node)> CreateNode{6};

inline constexpr EpApiFunction<OrtStatus*(OrtEpFactory* factory, const OrtHardwareDevice* device, const OrtKeyValuePairs* metadata, const OrtKeyValuePairs* options, OrtEpDevice** ep_device)> CreateEpDevice{0};
inline constexpr EpApiFunction<OrtStatus*(OrtEpGraphSupportInfo* support, const OrtNode* const* nodes, std::size_t count, const OrtNodeFusionOptions* options)> EpGraphSupportInfo_AddNodesToFuse{2};
inline constexpr EpApiFunction<OrtStatus*(OrtHardwareDeviceType type, std::uint32_t vendor, std::uint32_t device, const char* vendor_name, const OrtKeyValuePairs* metadata, OrtHardwareDevice** hardware)> CreateHardwareDevice{16};
inline constexpr EpApiFunction<void(OrtHardwareDevice* hardware)> ReleaseHardwareDevice{17};
// API 25
inline constexpr EpApiFunction<OrtStatus*(OrtProfilingEventCategory category, std::int32_t process_id, std::int32_t thread_id, const char* name, std::int64_t timestamp_us, std::int64_t duration_us, const char* const* keys, const char* const* values, std::size_t arguments, OrtProfilingEvent** event)> CreateProfilingEvent{65};
inline constexpr EpApiFunction<void(OrtProfilingEvent* event)> ReleaseProfilingEvent{66};
inline constexpr EpApiFunction<OrtStatus*(OrtProfilingEventsContainer* container, const OrtProfilingEvent* const* events, std::size_t count)> ProfilingEventsContainer_AddEvents{72};
// clang-format on

}  // namespace flownpu::ort

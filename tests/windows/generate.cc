// SPDX-License-Identifier: Apache-2.0
// generate.exe MODEL TOKENS PROMPT [KEY=VALUE ..]: registers flownpu_ep.dll with ORT GenAI, both
// beside this program, opens a model with these provider options, and continues a prompt greedily.
// Prints the tokens, those of the prompt first, on one line. Errors go to stderr, with exit code 1.
//
// It uses GenAI's C interface, whose header no package index has: functions are looked up in the
// library by name, and their types are given where they are called.
#include <windows.h>
//
#include <shellapi.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr const char* kProvider = "FlowNPUExecutionProvider";

std::string utf8(const std::filesystem::path& path) {
  const std::u8string text = path.u8string();
  return {text.begin(), text.end()};
}

HMODULE load(const std::filesystem::path& file) {
  HMODULE const library = LoadLibraryExW(file.c_str(), nullptr, LOAD_WITH_ALTERED_SEARCH_PATH);
  if (library == nullptr)
    throw std::runtime_error("cannot load " + utf8(file) + ": error " +
                             std::to_string(GetLastError()));
  return library;
}

// ORT GenAI's functions. Its objects are opaque pointers, which are never freed.
class Genai {
 public:
  explicit Genai(const std::filesystem::path& file) : library_(load(file)) {}

  // Calls a function that returns an OgaResult, null for success; throws its error.
  template <typename... Arguments>
  void call(const char* name, Arguments... arguments) const {
    void* const result = find<void*(Arguments...)>(name)(arguments...);
    if (result == nullptr) return;
    throw std::runtime_error(std::string(name) + ": " +
                             find<const char*(void*)>("OgaResultGetError")(result));
  }
  template <typename Signature>
  Signature* find(const char* name) const {
    void* const function = reinterpret_cast<void*>(GetProcAddress(library_, name));
    if (function == nullptr) throw std::runtime_error(std::string("GenAI has no ") + name);
    return reinterpret_cast<Signature*>(function);
  }

 private:
  HMODULE library_;
};

void* open(const Genai& genai, const std::string& folder, const std::vector<std::string>& options) {
  void* config = nullptr;
  genai.call("OgaCreateConfig", folder.c_str(), &config);
  genai.call("OgaConfigClearProviders", config);
  genai.call("OgaConfigAppendProvider", config, kProvider);
  for (const std::string& option : options) {
    const std::size_t equals = option.find('=');
    if (equals == std::string::npos)
      throw std::runtime_error("expected KEY=VALUE, got '" + option + "'");
    const std::string key = option.substr(0, equals);
    genai.call("OgaConfigSetProviderOption", config, kProvider, key.c_str(),
               option.c_str() + equals + 1);
  }
  void* model = nullptr;
  genai.call("OgaCreateModelFromConfig", static_cast<const void*>(config), &model);
  return model;
}

void generate(const Genai& genai, const void* model, std::size_t count, const std::string& prompt) {
  void* tokenizer = nullptr;
  genai.call("OgaCreateTokenizer", model, &tokenizer);
  void* sequences = nullptr;
  genai.call("OgaCreateSequences", &sequences);
  genai.call("OgaTokenizerEncode", static_cast<const void*>(tokenizer), prompt.c_str(), sequences);
  const auto given = genai.find<std::size_t(const void*, std::size_t)>(
      "OgaSequencesGetSequenceCount")(sequences, 0);
  const std::size_t length = given + count;

  void* parameters = nullptr;
  genai.call("OgaCreateGeneratorParams", model, &parameters);
  genai.call("OgaGeneratorParamsSetSearchBool", parameters, "do_sample", false);
  genai.call("OgaGeneratorParamsSetSearchNumber", parameters, "max_length",
             static_cast<double>(length));
  void* generator = nullptr;
  genai.call("OgaCreateGenerator", model, static_cast<const void*>(parameters), &generator);
  genai.call("OgaGenerator_AppendTokenSequences", generator, static_cast<const void*>(sequences));
  const auto is_done = genai.find<bool(void*)>("OgaGenerator_IsDone");
  while (!is_done(generator)) genai.call("OgaGenerator_GenerateNextToken", generator);

  const auto made = genai.find<std::size_t(const void*, std::size_t)>(
      "OgaGenerator_GetSequenceCount")(generator, 0);
  const auto* const tokens = genai.find<const std::int32_t*(const void*, std::size_t)>(
      "OgaGenerator_GetSequenceData")(generator, 0);
  for (std::size_t i = 0; i < made; ++i) std::printf(i == 0 ? "%d" : " %d", tokens[i]);
  std::printf("\n");
  std::fflush(stdout);
}

// The command line in UTF-8; main's own is in the console's code page.
std::vector<std::string> arguments() {
  int count = 0;
  wchar_t** const words = CommandLineToArgvW(GetCommandLineW(), &count);
  std::vector<std::string> found;
  for (int i = 1; i < count; ++i) found.push_back(utf8(words[i]));
  return found;
}

void run() {
  const std::vector<std::string> given = arguments();
  if (given.size() < 3) throw std::runtime_error("expected MODEL TOKENS PROMPT [KEY=VALUE ..]");
  std::wstring program(32768, L'\0');
  program.resize(GetModuleFileNameW(nullptr, program.data(), static_cast<DWORD>(program.size())));
  const std::filesystem::path folder = std::filesystem::path(program).parent_path();
  load(folder / "onnxruntime.dll");  // GenAI takes the loaded library
  const Genai genai(folder / "onnxruntime-genai.dll");
  genai.find<void(const char*, const char*)>("OgaRegisterExecutionProviderLibrary")(
      kProvider, utf8(folder / "flownpu_ep.dll").c_str());
  const void* const model = open(genai, given[0], {given.begin() + 3, given.end()});
  generate(genai, model, std::stoul(given[1]), given[2]);
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "generate: %s\n", error.what());
    return 1;
  }
  return 0;
}

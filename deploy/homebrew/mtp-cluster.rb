# The formula of mtp-cluster. A release (CONTRIBUTING.md) adds the url and sha256 of its sdist before the license.
class MtpCluster < Formula
  desc "One Qwen3.5 model over several Macs, drafting with its own head"
  homepage "@URL@"
  license all_of: ["Apache-2.0", "PSF-2.0"]
  head "@URL@", using: :git, branch: "main"

  depends_on "python@3.13"

  def install
    # The wheels of MLX and gRPC are built for this system, so pip installs them with the tested versions.
    venv = libexec/"venv"
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", venv
    system venv/"bin/pip", "install", "--constraint", "constraints.txt", "."
    bin.install_symlink venv/"bin/mtp-coord", venv/"bin/mtp-worker"
    generate_completions_from_executable(bin/"mtp-coord", shell_parameter_format: :typer)
  end

  service do
    run [opt_bin/"mtp-worker"]
    keep_alive true
    log_path var/"log/mtp-worker.log"
    error_log_path var/"log/mtp-worker.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mtp-coord --version") unless head?
    prompt = ["--raw", "--prompt", "x = ", "--max-tokens", "2"]
    assert_match "2 tokens", shell_output("#{bin}/mtp-coord generate #{prompt.shelljoin} 2>&1")
  end
end

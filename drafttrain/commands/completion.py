"""`drafttrain completion`."""

from __future__ import annotations

from typing import Literal

from drafttrain.command import command


@command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes drafttrain's commands, flags, values and files.

    ```
    drafttrain completion bash > ~/.local/share/bash-completion/completions/drafttrain
    drafttrain completion zsh > ~/.zsh/completions/_drafttrain         # a folder of $fpath, before compinit runs
    drafttrain completion fish > ~/.config/fish/completions/drafttrain.fish
    ```

    A new shell then completes; run it again after an update of drafttrain.

    Args:
        shell: the shell that reads the script
    """
    from drafttrain.commands import COMMANDS, app_of

    print(app_of(*COMMANDS).generate_completion(shell=shell))

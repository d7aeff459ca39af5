"""Chat templates in the manner of widespread models, written for these tests."""

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=none, calls=0) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set ns.calls = ns.calls + 1 %}
            {{- '<|im_start|>assistant\\n<tool_call>' + (call.function | tojson) + '</tool_call><|im_end|>\\n' }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {%- if message.reasoning_content is defined %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text' else '<' + part.type + '>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
    {%- set ns.last = loop.index %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role in ('user', 'assistant') %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant!") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

PLAIN_BLOCKS = """\
{% for message in messages %}
{% if loop.first %}
first
{% endif %}
    {% set extra = dict(a=1, **dict.fromkeys(['b'], 2)) %}
{{ message['role'] }}: {{ message['content'] }} {{ extra | tojson(indent=2, sort_keys=true) }}
{% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
"""

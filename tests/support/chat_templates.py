"""Chat templates in the habits of the model families, and some that use every corner of Jinja."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}\n"
)

# Statements on lines of their own: all white space comes from trim_blocks and lstrip_blocks.
LINES = """
{% for message in messages %}
    {% if message.role == 'user' %}
<|user|>
{{ message.content + eos_token }}
    {% elif message.role == 'system' %}
<|system|>
{{ message.content + eos_token }}
    {% else %}
<|assistant|>
{{ message.content + eos_token }}
    {% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
    {% endif %}
{% endfor %}

"""

INSTRUCT = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set first = messages[0]['content'] %}{% else %}{% set rest = messages %}"
    "{% set first = false %}{% endif %}{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and first != false %}"
    "{% set content = '<<' + first.strip() + '>>\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start>' + role + '\n' + message['content'] | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>model\n' }}{% endif %}"
)

THINKING = """{%- if tools %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set state = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if state.open and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set state.open = false %}
        {%- set state.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > state.last %}
            {{- '<a><think>' + thought.strip('\\n') + '</think>' + content }}
        {%- else %}
            {{- '<a>' + content }}
        {%- endif %}
    {%- else %}
        {{- '<' + message.role + '>' + content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<a>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}"""

HEADERS = """{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{#- The header #}
{{- "<h>system</h>\\n\\n" }}
{%- if tools is not none %}
    {{- "Tools!\\n" }}
{%- endif %}
{{- system + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<h>' + message['role'] + '</h>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<h>assistant</h>\\n\\n' }}
{%- endif %}
"""

METHODS = (
    "{% for m in messages %}{{ m.role.upper() }}:{{ m.role.title() }} {{ m.get('content') }}"
    "{{ m.get('name', 'anon') }}|{{ m.keys()|list|length > 1 }}"
    "{% if not loop.last %}\n{% endif %}{% endfor %}{{ '%s-%d' % ('a', 3) }}"
    "{{ (messages[0].role ~ 'x').removesuffix('x').removeprefix('us') }}{{ +1 }}"
    "{{ messages[0]['content'].split('a')|length }}{{ messages[0]['content'].split('a')[1:]|length"
    " }}{{ ''|default('empty', boolean=true) }}{{ {'a': 'b', 'c': 'd'}.values()|join('+') }}"
    "{{ 'x'.capitalize().lower() }}{{ {'k': 1}.items()|list|length }}"
)

JUMPS = (
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% elif loop.index > 2 %}"
    "{% break %}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% for x in [1, 2, 3] %}{% if x == 2 %}{{ x }}{% break %}{% endif %}{% for y in [x, 9] %}"
    "{% if y == 9 %}{% continue %}{% endif %}({{ y }}){% endfor %}{% endfor %}"
)

NONE_AND_UNDEFINED = (
    "{% for m in messages %}{% if m.name is not none %}N{% endif %}"
    "{% if m.content is not none and m.content is defined %}{{ m.content }}{% endif %}"
    "{% if m.content is sequence %}S{% endif %}{{ 'B' if bos_token is defined }}"
    "{{ 'X' if sep_token is defined else 'Y' }}{{ m.name is none }}{{ m.nothing }}{% endfor %}"
    "{% set q = none %}{{ q is none }}{{ q is not none }}{{ 'T' if tools is not none }}"
    "{{ tools is defined }}{{ true }}{{ 1 == 2 }}"
)

WHITE_SPACE = (
    "   \n  {% if true %}   \n a\n   {% endif %}\n  {{- 'x' }}  \n\n {%- for m in messages -%}  \n"
    " {{ m.content }} \n{% endfor %}\n{# c #}\n end {{ '{{ %} #}' }} \"quoted\" \\ \n\n"
)

MACROS = (
    "{% macro turn(m, sep='\n') %}<{{ m.role }}>{{ sep }}{{ m.content|trim }}"
    "{{ caller() if caller is defined }}{% endmacro %}{% for m in messages %}"
    "{% call turn(m) %}!{% endcall %}{{ turn(m, sep=' ') }}{% endfor %}"
    "{% set t %}{{ messages[0].content }}{% endset %}{{ t|length }}"
    "{% filter upper %}abc{% endfilter %}{% set x | trim | upper %} q {% endset %}{{ x }}"
    "{% with y = 'w' %}{{ y }}{% endwith %}{% raw %}{{ raw }}{% endraw %}"
)

GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)

STRING_OR_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% elif m.content is iterable %}{% for p in m.content %}{{ p['text'] | trim }}{% endfor %}"
    "{% endif %}\n{% endfor %}"
)

TEXT = {
    "chatml": CHATML,
    "lines": LINES,
    "instruct": INSTRUCT,
    "no system": NO_SYSTEM,
    "thinking": THINKING,
    "headers": HEADERS,
    "methods": METHODS,
    "jumps": JUMPS,
    "none and undefined": NONE_AND_UNDEFINED,
    "white space": WHITE_SPACE,
    "macros": MACROS,
    "generation": GENERATION,
    "string or parts": STRING_OR_PARTS,
}

PARTS_ONLY = {
    "parts": (
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text|trim }}{% elif p.type == 'image' %}<image>{% endif %}"
        "{% endfor %}</{{ m.role }}>{% endfor %}"
    ),
    "first part": "{% for m in messages %}<{{ m.role }}>{{ m.content[0]['text'] }}{% endfor %}",
}
